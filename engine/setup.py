"""The C library as a part of the package's build: its sources always, the compiled library if there is a compiler.

A wheel holds both below rayloom_engine/cpu_library. An editable installation compiles the library into the source tree,
where it finds the C sources, too. Everything else about the package is in pyproject.toml.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).resolve().parent
_PACKAGE = Path("rayloom_engine", "cpu_library")
_SOURCES = _ROOT / "csrc" / "cpu"


def _load_build_module():
    """Returns rayloom_engine.cpu_library.build, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("cpu_library_build", _ROOT / "src" / _PACKAGE / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        build = _load_build_module()
        if self.editable_mode:
            build.build_into(_ROOT / "src" / _PACKAGE, _SOURCES)
            return
        folder = Path(self.build_lib) / _PACKAGE
        for source in build.source_files(_SOURCES):
            (folder / "csrc").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / "csrc" / source.name)
        build.build_into(folder, _SOURCES)


class DistributionWithLibrary(Distribution):
    def has_ext_modules(self):
        """Returns whether the wheel fits one platform only, because it will have a compiled library."""
        build = _load_build_module()
        return not build.unsupported_machine() and build.find_compiler(os.environ) is not None


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self):
        """Returns the tag of a wheel for all Pythons: the library does not use Python's binary interface."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(distclass=DistributionWithLibrary, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelOfAnyPython})
