"""Build of the Cython kernels. Metadata is in pyproject.toml; only the extensions are here.

DORYLUS_BOUNDS_CHECK=1 in the environment builds them with every array access checked.
DORYLUS_SANITIZE=1 builds them with the compiler's address and undefined-behaviour sanitizers; then, with gcc,
LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m pytest tests
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

PACKAGE = "cython_kernels"
MODULES = (
    "_aggregate",
    "_attention",
    "_attention_v2",
    "_locality",
    "_ordering",
    "_rows",
    "_dropout_masks",
    "_activation",
    "_loss",
    "_max_pull",
    "_narrow",
    "_transpose",
    "_build",
)

# The one table of compiler directives. `checked` overrides it in the bounds-checked build, where
# wraparound stays off so that a negative index is an error and does not read from the end.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "cdivision": True,
    "binding": True,
    "freethreading_compatible": True,
}
CHECKED_DIRECTIVES = {
    **DIRECTIVES,
    "boundscheck": True,
    "initializedcheck": True,
    "nonecheck": True,
    "cdivision": False,
}

# No -march=native and no -ffast-math: one portable wheel. No contraction to fused multiply-add
# either, which a compiler may use in the body of a vector loop and not in its tail: results must
# not depend on how the columns were split.
# How vectors are passed between functions (-Wpsabi) is no concern: all that take any are inlined. gcc 12
# finds its own intrinsics uninitialised.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-Wno-psabi", "-Wno-maybe-uninitialized"]
CHECKED_FLAGS = ["-std=c++17", "-O1", "-g0", "-ffp-contract=off", "-Wno-psabi", "-Wno-maybe-uninitialized"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]

OPENMP_FLAGS = (
    (["-fopenmp"], ["-fopenmp"]),  # gcc; clang with its own runtime
    (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),  # Apple clang with libomp installed
)
OPENMP_PROGRAM = """
#include <omp.h>
int main(void) {
    int n = 0;
    #pragma omp parallel for reduction(+:n)
    for (int i = 0; i < 4; i++) n += omp_get_num_threads() > 0;
    return n == 4 ? 0 : 1;
}
"""

# Everything generated stays below build/. The settings file changes exactly when the settings do
# and every extension depends on it, so nothing built under other settings survives.
GENERATED = Path("build", "cython")
SETTINGS = Path("build", "cython_kernels.json")


def wants(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def find_openmp(compiler) -> tuple[list[str], list[str]]:
    """The first OpenMP flags that compile and link a small program; empty lists if none do."""
    for compile_flags, link_flags in OPENMP_FLAGS:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(OPENMP_PROGRAM)
            try:
                objects = compiler.compile([str(source)], output_dir=folder, extra_postargs=compile_flags)
                compiler.link_executable(objects, str(Path(folder, "probe")), extra_postargs=link_flags)
            except (CompileError, LinkError):
                continue
            return compile_flags, link_flags
    print("notice: the compiler has no working OpenMP; the kernels are built for one thread")
    return [], []


def refresh_settings(settings: dict[str, object]) -> None:
    """Write the settings file; if they changed, drop what was generated under the old ones."""
    text = json.dumps(settings, indent=1, sort_keys=True)
    if SETTINGS.exists() and SETTINGS.read_text() == text:
        return
    SETTINGS.unlink(missing_ok=True)
    shutil.rmtree(GENERATED, ignore_errors=True)
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(text)


class BuildKernels(build_ext):
    """Probe the compiler, translate the .pyx files, then compile as usual."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self) -> None:
        checked = wants("DORYLUS_BOUNDS_CHECK")
        sanitize = SANITIZE if wants("DORYLUS_SANITIZE") else []
        directives = CHECKED_DIRECTIVES if checked else DIRECTIVES
        openmp_compile, openmp_link = find_openmp(self.compiler)
        for extension in self.extensions:
            extension.extra_compile_args = (CHECKED_FLAGS if checked else FLAGS) + openmp_compile + sanitize
            extension.extra_link_args = openmp_link + sanitize
            extension.define_macros = [("DORYLUS_BOUNDS_CHECK", str(int(checked)))]
        refresh_settings(
            {"directives": directives, "compile": self.extensions[0].extra_compile_args, "link": openmp_link}
        )
        translated = cythonize(self.extensions, build_dir=str(GENERATED), compiler_directives=directives)
        for extension, c_extension in zip(self.extensions, translated, strict=True):
            extension.sources = c_extension.sources
            extension.depends = [*extension.depends, *c_extension.depends, str(SETTINGS)]
        super().build_extensions()


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}.{name}",
            [f"{PACKAGE}/{name}.pyx"],
            language="c++",
            include_dirs=[PACKAGE],
            depends=[str(header) for header in sorted(Path(PACKAGE, "simd").glob("*.hpp"))],
        )
        for name in MODULES
    ],
    cmdclass={"build_ext": BuildKernels},
)
