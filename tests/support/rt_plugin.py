"""Code that a test brings into a server's ranks from outside: shipped code has no hooks."""

from __future__ import annotations

from pathlib import Path

_SITE = '''
import importlib.abc, importlib.util, sys

class Patch(importlib.abc.MetaPathFinder):
    """Changes Runner once its module is there; nobody imports torch because of it."""

    def find_spec(self, name, path, target=None):
        if name != "rayloom_engine.worker.runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module.Runner)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patch())
'''

_STANDS_STILL = """
import os, time

def patch(runner):
    run = runner.run

    def stuck(self, plan):
        try:
            with open({flag!r}) as flag:
                is_meant = int(flag.read()) == self._model.stage.index
        except (OSError, ValueError):
            is_meant = False
        if is_meant:
            os.unlink({flag!r})
            while True:
                time.sleep(1.0)
        return run(self, plan)

    runner.run = stuck
"""


def write_plugin(folder: Path, flag: Path) -> Path:
    """A folder for PYTHONPATH: a rank of the stage that the file `flag` names takes the file away and stands still."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_STANDS_STILL.format(flag=str(flag)) + _SITE)
    return folder
