"""Check of a refusal on the command line."""


def assert_refused(code: int, shown: str, wanted: str, expected_code: int = 1) -> None:
    assert code == expected_code, shown
    assert shown.startswith("error: ")
    assert wanted in shown
    assert "Traceback" not in shown
