"""Causes of failed jobs that did not find a file or a module, and what the user's machine has of
it.

Each function looks at the case of a job, and returns an explanation, or None if its cause does not
apply.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.scheduler.case import Case, Explanation, Here
from clusterctl.scheduler.program_error import ProgramError, compiled, is_phrase, search
from clusterctl.spec.sbatch import values_in

_NO_FILE = r"[Nn]o such file or directory"
_OPEN = r"['\"`\u2018]"
_CLOSE = r"['\"\u2019]"
_NAME = r"(?P<file>[^'\"`\u2018\u2019\n]+)"
# The name of the file in messages about a missing file, from the most to the least certain form.
_NAMED: Final = (
    rf"(?P<file>[^'\":\s]+) cannot be read: {_NO_FILE}",
    rf"can't open file {_OPEN}{_NAME}{_CLOSE}",
    # coreutils, Fortran, awk
    rf"{_OPEN}{_NAME}{_CLOSE}(?: for \w+)?: (?:\[Errno 2\] )?{_NO_FILE}",
    rf"^tar: (?P<file>[^\n]+): Cannot \w+: {_NO_FILE}",
    # Python
    (
        rf"(?:{_NO_FILE}|[Ff]ile [Nn]ot [Ff]ound|non-existent "
        rf"directory)[^\n'\"]*{_OPEN}{_NAME}{_CLOSE}"
    ),
    # C++
    rf"{_NO_FILE} \[(?P<file>[^\]\n]+)\]",
    # Go
    (
        r"\b(?:open|stat|lstat|chdir|mkdir|readlink|remove) (?P<file>\S+): no such file or "
        r"directory"
    ),
    # bash and sh
    rf"^\S+: line \d+: (?:cd: )?(?P<file>[^:\n]+): {_NO_FILE}",
    (
        rf"^\S+: \d+: (?:\.: |cd: )?(?:cannot (?:open|create) |can't cd to "
        rf")?(?P<file>[^:\n]+): {_NO_FILE}"
    ),
    # PROGRAM: FILE, and paths
    rf"^\S+: (?P<file>[^'\":\s]+): (?:\[Errno 2\] )?{_NO_FILE}",
    rf"(?<![^'\":\s])(?P<file>[^'\":\s]*[^'\":\s.]/[^'\":\s]*|/[^'\":\s]+|\.{{1,2}}/[^'\":\s]+"
    rf"|[^'\":\s]+\.\w{{1,8}}): (?:\[Errno 2\] )?{_NO_FILE}",
)
# Words before the message that are the name of a call or of nothing.
_CALLS: Final = (
    r"(?:f?open(?:at|dir)?|l?stat|access|ch(?:dir|mod|own)|exec\w*|connect|bind|mmap|read(?:link)?"
    r"|write|unlink|rename|mkdir|rmdir|fail(?:ed|ure)|[Ee]rror|fatal|file|reading|writing|main"
    r"|perror)(?:\(\))?"
)


def _missing_name(error: ProgramError) -> tuple[str, re.Match[str]] | None:
    """Return the file that the error names as missing, "" if the message has no name; None: no such
    error.
    """
    for pattern in _NAMED:
        for match in compiled(pattern).finditer(error.evidence):
            if not compiled(_CALLS).fullmatch(match["file"]) and not is_phrase(match):
                return match["file"], match
    unnamed = search([_NO_FILE], error.evidence)
    return ("", unnamed) if unnamed is not None else None


# What sbatch writes for a letter after % in the name of a log. For other letters, see
# ``_log_pattern``.
_LOG_NAMES: Final = {"x": r"[^/]*", "N": r"[^/]*", "n": r"\d+", "%": "%"}


def _log_pattern(log: str) -> str:
    """Return a regular expression for the paths that sbatch makes of a value of --output."""
    parts = re.split(r"%\d*([A-Za-z%])", log)
    fields = (_LOG_NAMES.get(letter, r"\w+") for letter in parts[1::2])
    texts = map(re.escape, parts[::2])
    pattern = "".join(text + field for text, field in zip(texts, (*fields, ""), strict=True))
    return rf"(?:\./)?{pattern.removeprefix(re.escape('./'))}"


def log_has_another_path(case: Case) -> Explanation | None:
    """The script reads its own log. Evidence: the missing file fits the path in a line of the
    script.
    """
    found = _missing_name(case.error)
    if found is None or not found[0]:
        return None
    file, match = found
    for option, log in values_in(case.evidence.script.split("\n"), "--output", "--error").items():
        if re.fullmatch(_log_pattern(log), file):
            return Explanation(
                "log-has-another-path",
                f"no file {file}{case.at}: clusterctl writes the job's log to a file of its "
                f"own, so that the script's {option} has no effect",
                "`clusterctl logs` shows the log; if the script needs the file, redirect into "
                "it, as in `PROGRAM > FILE`",
                match,
            )
    return None


def file_stayed_at_home(case: Case) -> Explanation | None:
    """A file that is missing in the job exists on this machine, and was not sent."""
    found = _missing_name(case.error)
    if found is None or not found[0]:
        return None
    file, match = found
    here = case.evidence.left_here(file, is_module=False)
    if inside := here.inside:
        return Explanation(
            "file-in-program-folder",
            f"no file {file}{case.at}: it was sent, and is {inside} in the folder of the program",
            'find the script\'s folder with `dirname "$0"` or $SLURM_SUBMIT_DIR: the script that '
            "Slurm knows (`scontrol show job`) is clusterctl's",
            match,
        )
    if venv := here.venv:
        return Explanation(
            "virtual-environment-not-sent",
            f"no file {file}{case.at}: virtual environments are not sent with jobs",
            f"remove the line with {venv} from the script; {way_to_packages(case)}",
            match,
        )
    return _stayed(case, file, here, match)


def _stayed(case: Case, file: str, here: Here, match: re.Match[str] | None) -> Explanation | None:
    if home := here.home:
        return Explanation(
            "file-stayed-at-home",
            f"no file {file}{case.at}: it exists on your machine, but was not sent with the job",
            f"submit with --include {home}{case.excluded}",
            match,
        )
    if above := here.above:
        return Explanation(
            "file-stayed-at-home",
            f"no file {file}{case.at}: it exists in {above} on your machine, and that folder "
            "was not sent",
            f"submit with --folder {above}",
            match,
        )
    return None


# A program's own message about data that it did not find, and the paths in it.
_LACKS: Final = (
    r"(?i)\bno (?:\w+ ){1,4}?(?:in|at|under|below|for|found|matching|match)\b"
    r"|\bno such\b|\bnot (?:found|exist)"
    r"|\b(?:does|do|did)(?: not|n't) (?:exist|find|contain)|\bmissing\b|\bempty\b|\bfound 0\b"
    r"|\b(?:(?:could|can)(?: ?not|n?'t)|unable to) (?:find|open|read|load)"
    r"|\b0 (?:files|samples|images|examples|rows)\b"
)
_PATH: Final = r"[^\s'\"`\u2018\u2019<>|,;()\[\]{}]+"
_MOST_PATHS = 20


def data_stayed_at_home(case: Case) -> Explanation | None:
    """The program itself says that it found no data at a path. The path exists here, and was not
    sent.
    """
    text = case.error.evidence if case.error.tracebacks else "\n".join(case.error.last_lines)
    for line in text.split("\n"):
        # The message of a shell names the script, and lacks a program.
        if compiled(_LACKS).search(line) and "command not found" not in line:
            for path in _paths(line):
                here = case.evidence.left_here(path, is_module=False)
                if partly := here.partly:
                    return Explanation(
                        "file-stayed-at-home",
                        f"the program found nothing in {path}{case.at}: some of the files in it "
                        "on your machine were not sent with the job",
                        f"submit with --include {partly}{case.excluded}",
                    )
                if found := _stayed(case, path, here, None):
                    return found
    return None


def _paths(line: str) -> Iterator[str]:
    """Yield the words of a line that may be paths. For a pattern such as data/*.txt, yield its
    folder.
    """
    quoted = re.findall(r"['\"`\u2018]([^'\"`\u2018\u2019\n]+)['\"\u2019]", line)
    words = (word.rstrip(".:,!?") for word in (*quoted, *compiled(_PATH).findall(line)))
    for word in [word for word in words if "/" in word.strip("/") or word in quoted][:_MOST_PATHS]:
        fixed = re.split(r"[^/]*[*?\[]", word, maxsplit=1)[0].rstrip("/")
        if fixed and fixed not in (".", ".."):
            yield fixed


def missing_file(case: Case) -> Explanation | None:
    """A file is missing, and this machine has no such file either."""
    if (found := _missing_name(case.error)) is None:
        return None
    file, match = found
    if not file:
        return Explanation(
            "missing-file",
            f"a file does not exist{case.at}; the message does not name it",
            "look for the file's name in the log's lines before the message, or in the program",
            match,
        )
    return Explanation(
        "missing-file",
        f"no such file{case.at}: {file}",
        "use the path of the file on the cluster; upload data with `clusterctl put`, and files "
        "in the script's folder with --include",
        match,
    )


# --- Modules of Python ---------------------------------------------------------------------------
NO_MODULE: Final = r"(?:^|\wError: .*|python[\d.]*: )No module named '?(?P<module>[\w.]+)"
# Names of modules on PyPI, if they differ from the modules' own names.
_PACKAGES: Final = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "haiku": "dm-haiku",
    "igraph": "python-igraph",
    "imblearn": "imbalanced-learn",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "levenshtein": "python-Levenshtein",
    "lightning_fabric": "lightning",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "osgeo": "GDAL",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "hydra": "hydra-core",
    "pl_bolts": "lightning-bolts",
    "psycopg2": "psycopg2-binary",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel.yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "websocket": "websocket-client",
    "wx": "wxPython",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


# Packages that many programs import by their own name.
_SAME_NAME: Final = frozenset(
    "accelerate aiohttp albumentations anndata ase astropy catboost cupy dask datasets deepspeed "
    "diffusers einops flask flax gymnasium h5py horovod joblib keras lightgbm lightning matplotlib "
    "mlflow mpi4py nibabel nltk numba numexpr numpy omegaconf onnx openai optax optuna orbax pandas "
    "peft plotly polars psutil pyarrow pydantic pytest ray requests rdkit scanpy scipy seaborn "
    "sentencepiece spacy sqlalchemy statsmodels sympy tensorboard tensorflow tiktoken timm tokenizers "
    "torch torchaudio torchmetrics torchvision tqdm transformers triton vllm wandb xarray xformers "
    "xgboost zarr".split()
)
# Names so similar differ in a letter or two.
_SIMILAR: Final = 0.8


def missing_module(case: Case) -> Explanation | None:
    """Python did not find a module. This machine may have the module, or a file that lists its
    package.
    """
    match = search([NO_MODULE], case.error.evidence)
    if match is None:
        return None
    module = case.with_groups(match)["module"]
    here = case.evidence.left_here(module.replace(".", "/"), is_module=True)
    return _module_stayed(case, module, here, match) or _module_not_installed(case, module, match)


def _module_stayed(case: Case, module: str, here: Here, match: re.Match[str]) -> Explanation | None:
    """Explain why the job does not find a module of the user."""
    what = f"no module {module}{case.at}"
    if home := here.home:
        return Explanation(
            "module-stayed-at-home",
            f"{what}: it exists on your machine, but was not sent with the job",
            f"submit with --include {home}{case.excluded}",
            match,
        )
    if above := here.above:
        return Explanation(
            "module-stayed-at-home",
            f"{what}: it exists in {above} on your machine, and that folder was not sent",
            f"submit with --folder {above}",
            match,
        )
    if elsewhere := here.elsewhere:
        return Explanation(
            "module-stayed-at-home",
            f"{what}: it exists on your machine ({elsewhere}), but was not sent with the job",
            f"submit with --folder and the folder of your project that contains {elsewhere}; "
            f"set --env PYTHONPATH to the path of {here.root} below it",
            match,
        )
    if beside := here.beside:
        return Explanation(
            "own-module-not-found",
            f"{what}: it was sent with the job, in a folder that Python does not search",
            f"submit with --env PYTHONPATH={beside}, or run the program as a module: "
            "`clusterctl submit -m MODULE`",
            match,
        )
    if own := here.own:
        return Explanation(
            "own-module-not-found",
            f"{what}: your package {own} was sent with the job, and does not contain the module",
            f"correct the import, or add the module to {own}",
            match,
        )
    return None


def _module_not_installed(case: Case, module: str, match: re.Match[str]) -> Explanation:
    top = module.partition(".")[0]
    package = _PACKAGES.get(module) or _PACKAGES.get(top) or top
    # Another name may be misspelt, or be that of another package on PyPI.
    is_sure = package != top or top in _SAME_NAME
    what = package if is_sure else f"the package that has {top}"
    meant = "" if is_sure else _similar_to(top)
    first = f"correct the import if {meant} is meant, or " if meant else ""
    packages = case.evidence.packages()
    fix = (
        f"{first}add {what} to a requirements file, and submit with --requirements requirements.txt"
    )
    if packages.image:
        fix = (
            f"{first}add {what} to the image, or use another: with --container, --requirements has "
            "no effect"
        )
    elif packages.environment:
        fix = (
            f"{first}install {what} in the environment {packages.environment} on the cluster, or use "
            "--requirements in place of --env-path"
        )
    elif choice := packages.choices.get(canonicalize_name(package)):
        fix = f"submit with --requirements {choice}"
    elif packages.way:
        fix = packages.way
    elif packages.listed:
        fix = (
            f"{first}submit with --requirements {packages.listed}; if the file does not list {what}, "
            "add it"
        )
    return Explanation(
        "missing-module",
        f"no module {module}{case.at}{f' (is {meant} meant?)' if meant else ''}",
        fix,
        match,
    )


def _similar_to(module: str) -> str:
    """Return a module of which a name may be a misspelling, or ""."""
    near = []
    for known in (_SAME_NAME | _PACKAGES.keys(), sys.stdlib_module_names):
        near += difflib.get_close_matches(module, sorted(known), 1, _SIMILAR)
    # Names such as torchx are extended on purpose.
    return "" if not near or module.startswith(near[0]) else near[0]


def way_to_packages(case: Case) -> str:
    """Return how the job gets the packages of Python of an environment that is not sent."""
    packages = case.evidence.packages()
    if packages.image or packages.environment:
        return "submit again: the packages are those of --container or --env-path"
    if packages.way:
        return packages.way
    listed = packages.listed or "requirements.txt (such a file: pip freeze)"
    return f"submit with --requirements {listed}"
