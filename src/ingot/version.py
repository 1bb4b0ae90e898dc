"""The version of Ingot."""


def package_version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("ingot")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0"
