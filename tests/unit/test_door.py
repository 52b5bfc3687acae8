"""The public door: what `import kvq` shows, and that it costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvq


def test_the_door_shows_its_table_and_nothing_else() -> None:
    assert sorted(kvq.__all__) == sorted(kvq._DOOR)
    assert dir(kvq) == sorted(kvq.__all__)


@pytest.mark.parametrize("name", kvq.__all__)
def test_every_name_leads_somewhere(name: str) -> None:
    module, attribute = kvq._DOOR[name]
    assert getattr(kvq, name) is getattr(sys.modules[module], attribute)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvq.nothing  # type: ignore[attr-defined]


def test_importing_kvq_imports_neither_mlx_nor_redis() -> None:
    code = "import sys, kvq, kvq.store; print({'mlx', 'redis', 'rq'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
