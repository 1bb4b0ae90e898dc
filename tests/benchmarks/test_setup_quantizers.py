"""Every environment gets the same torch, and pins what its package is measured with."""

from benchmarks.setup_quantizers import ENVIRONMENTS, FIRST


def test_torch_is_pinned_first_and_nowhere_else() -> None:
    assert FIRST[0].startswith("torch==")
    assert not any(package.startswith("torch==") for packages in ENVIRONMENTS.values() for package in packages)


def test_every_package_is_pinned() -> None:
    assert all("==" in package for packages in ENVIRONMENTS.values() for package in packages)
