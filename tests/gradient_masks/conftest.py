from tests.methods.conftest import build  # noqa: F401
