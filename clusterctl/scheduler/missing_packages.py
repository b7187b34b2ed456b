"""Causes of failed jobs that lack a package of another language than Python, or the headers of a
library.

Each function looks at the case of a job, and returns an explanation, or None if its cause does not
apply. To add a language or a library, add a row to its table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from clusterctl.scheduler.case import Case, Explanation
from clusterctl.scheduler.program_error import search


class Language(NamedTuple):
    """How a language says that a package is missing, and what distributions call that package.

    pattern: has the group ``name``. debian, red_hat: with ``{name}``, the name with hyphens; in
        lower case for Debian. "": the distribution has no such packages. otherwise: how the job's
        user installs it.
    ending: of the files of the user's own modules, and the variable with the folders in which they
        are searched, for the folder ``{folder}``. "": the user's own are not looked for.
    """

    name: str
    pattern: str
    debian: str
    red_hat: str
    otherwise: str
    ending: str = ""
    variable: str = ""


_LANGUAGES: Final = (
    Language(
        "R",
        r"there is no package called [\u2018'](?P<name>[\w.]+)[\u2019']",
        "r-cran-{name}",
        "R-{name}",
        "install.packages in `clusterctl ssh -- R`",
    ),
    Language(
        "Perl",
        r"^Can't locate (?P<name>[\w/]+)\.pm in @INC",
        "lib{name}-perl",
        "perl-{name}",
        "cpan in `clusterctl ssh`",
        ".pm",
        "PERL5LIB={folder}",
    ),
    Language(
        "Julia",
        r"^ERROR: (?:LoadError: )?ArgumentError: Package (?P<name>\w+)(?: \[[^\]\n]*\])? "
        r"(?:not found in current path|is required but does not seem to be installed)",
        "",
        "",
        "Pkg.add in `clusterctl ssh -- julia`",
    ),
    Language(
        "Ruby",
        r"cannot load such file -- (?P<name>[\w/-]+) \(LoadError\)",
        "ruby-{name}",
        "rubygem-{name}",
        "gem install --user-install in `clusterctl ssh`",
        ".rb",
        "RUBYLIB={folder}",
    ),
    Language(
        "Lua",
        r"^lua\S*: .*module '(?P<name>[\w.]+)' not found:$",
        "lua-{name}",
        "lua-{name}",
        "luarocks install --local in `clusterctl ssh`",
        ".lua",
        "'LUA_PATH={folder}/?.lua;;'",
    ),
)


def missing_package(case: Case) -> Explanation | None:
    """Explain that a program in R, Perl or the like lacks a package."""
    for language in _LANGUAGES:
        if (match := search([language.pattern], case.error.evidence)) is not None:
            name = match["name"].replace("/", "::" if language.name == "Perl" else "/")
            return _own_module(case, language, name, match) or Explanation(
                "missing-package",
                f"no package {name} of {language.name}{case.at}",
                _fix_for_package(case, language, match["name"]),
                match,
            )
    return None


def _own_module(
    case: Case, language: Language, name: str, match: re.Match[str]
) -> Explanation | None:
    """Explain why the job does not find a module of the user."""
    if not language.ending:
        return None
    file = match["name"].replace(".", "/") + language.ending
    here = case.evidence.left_here(file, is_module=False)
    what = f"no module {name} of {language.name}{case.at}"
    if here.beside:
        return Explanation(
            "own-module-not-found",
            f"{what}: it was sent with the job, in a folder that {language.name} does not search",
            f"submit with --env {language.variable.format(folder=here.beside)}",
            match,
        )
    if place := here.home or here.above:
        flag = "--include" if here.home else "--folder"
        return Explanation(
            "module-stayed-at-home",
            f"{what}: it exists on your machine, but was not sent with the job",
            f"submit with {flag} {place}{case.excluded}",
            match,
        )
    return None


def _fix_for_package(case: Case, language: Language, name: str) -> str:
    hyphened = name.replace("/", "-").replace(".", "-")
    if case.evidence.packages().image:
        return "add the package to the image, or use another image with --container"
    own = f"install it in the job user's home, such as with {language.otherwise}"
    if not case.is_operator or not language.debian:
        return f"{own}; or use a --module, an --env-path or a --container that has it"
    return (
        f"add it to the nodes: `software: {{packages: [{language.debian.format(name=hyphened.lower())}]}}` "
        f"in the spec (Rocky Linux: {language.red_hat.format(name=hyphened)}), then `clusterctl up`; or "
        f"{own}"
    )


_BUILD_FAILED: Final = r"^clusterctl: the build failed on "


class Library(NamedTuple):
    """A library or a tool. names: pattern of a library's headers, modules of Fortran, and of its
    name for the linker, or of a tool's commands. module: its usual environment module.
    """

    names: str
    debian: str
    red_hat: str
    module: str


_LIBRARIES: Final = (
    Library(
        r"mpi(?:f|_f08)?\.(?:h|mod)|mpi(?:_\w+)?", "libopenmpi-dev", "openmpi-devel", "openmpi"
    ),
    Library(r"hdf5\.(?:h|mod)|H5\w+\.h|hdf5(?:_\w+)?", "libhdf5-dev", "hdf5-devel", "hdf5"),
    Library(r"netcdf\.h|netcdf", "libnetcdf-dev", "netcdf-devel", "netcdf"),
    Library(r"netcdf\.mod|netcdff", "libnetcdff-dev", "netcdf-fortran-devel", "netcdf-fortran"),
    Library(r"fftw3\S*\.(?:h|f03?)|fftw3\w*", "libfftw3-dev", "fftw-devel", "fftw"),
    Library(r"(?:open)?c?blas\.h|(?:open)?blas", "libopenblas-dev", "openblas-devel", "openblas"),
    Library(r"lapacke?\.h|lapacke?", "liblapacke-dev", "lapack-devel", "lapack"),
    Library(r"gsl/\S+|gsl(?:cblas)?", "libgsl-dev", "gsl-devel", "gsl"),
    Library(r"boost/\S+|boost_\w+", "libboost-all-dev", "boost-devel", "boost"),
    Library(r"Eigen/\S+", "libeigen3-dev", "eigen3-devel", "eigen"),
    Library(r"Python\.h", "python3-dev", "python3-devel", "python"),
    Library(r"zlib\.h|z", "zlib1g-dev", "zlib-devel", "zlib"),
    Library(r"numa\.h|numa", "libnuma-dev", "numactl-devel", "numactl"),
    Library(r"R\.h|Rcpp\.h", "r-base-dev", "R-devel", "R"),
)


# {name}: of the library. gcc and nvcc, clang, gfortran, ld
_LACKS_HEADER: Final = (
    r"fatal error: {name}: No such file or directory",
    r"fatal error: '{name}' file not found",
    r"Fatal Error: Cannot open module file '{name}' for reading",
    r"\bld: cannot find -l{name}(?:: No such file or directory)?$",
)


def missing_header(case: Case) -> Explanation | None:
    """Explain that a compiler lacks the headers of a library that distributions have."""
    if (found := _lacking(case, _LIBRARIES, _LACKS_HEADER)) is None:
        return None
    library, match = found
    what = f"the compiler does not find {match['name']}{case.at}"
    return Explanation("missing-header", what, _fix_for_library(case, library), match)


_TOOLS: Final = (
    Library(r"g?cc", "gcc", "gcc", "gcc"),
    Library(r"[gc]\+\+", "g++", "gcc-c++", "gcc"),
    Library(r"gfortran", "gfortran", "gcc-gfortran", "gcc"),
    Library(r"make", "make", "make", "make"),
    Library(r"cmake", "cmake", "cmake", "cmake"),
    Library(r"mpi(?:cc|cxx|c\+\+|CC|fort|f90|f77)", "libopenmpi-dev", "openmpi-devel", "openmpi"),
    Library(r"R(?:script)?", "r-base-core", "R-core", "R"),
    Library(r"ruby", "ruby", "ruby", "ruby"),
    Library(r"lua", "lua5.4", "lua", "lua"),
)


# {name}: of the tool. bash, sh, make, env, srun
_LACKS_TOOL: Final = (
    r"(?:^|[\s:]){name}: command not found$",
    r"^\S+: (?:line )?\d+: {name}: not found$",
    r"^\S*make(?:\[\d+\])?: {name}: No such file or directory$",
    r"^(?:\S*/)?env: ['\u2018]?{name}['\u2019]?: No such file or directory",
    r"execve\(\): {name}: No such file or directory",
)


def missing_tool(case: Case) -> Explanation | None:
    """Explain that a job lacks a compiler or an interpreter that distributions have."""
    if (found := _lacking(case, _TOOLS, _LACKS_TOOL)) is None:
        return None
    tool, match = found
    what = f"command not found{case.at}: {match['name']}"
    return Explanation("command-not-found", what, _fix_for_library(case, tool), match)


def missing_tool_of_build(case: Case) -> Explanation | None:
    """Explain that the command of --build lacks a compiler."""
    return missing_tool(case) if search([_BUILD_FAILED], case.error.evidence) else None


def _lacking(
    case: Case, libraries: Iterable[Library], words: Sequence[str]
) -> tuple[Library, re.Match[str]] | None:
    """Return the library that a job lacks, and the line that tells it. words: patterns of such
    lines, with {name} in place of the library's.
    """
    for library in libraries:
        name = rf"(?P<name>{library.names})"
        patterns = [pattern.replace("{name}", name) for pattern in words]
        if (match := search(patterns, case.error.evidence)) is not None:
            return library, match
    return None


def _fix_for_library(case: Case, library: Library) -> str:
    if case.is_operator:
        return (
            f"add it to the nodes: `software: {{packages: [{library.debian}]}}` in the spec (Rocky "
            f"Linux: {library.red_hat}), then `clusterctl up`; or use a --container"
        )
    module = f"--module {library.module} or another module of the site"
    return f"load it with {module}, or use a --container"
