# SPDX-License-Identifier: Apache-2.0
"""Builds FlashInfer's kernels for the GPU suite, on a machine that needs no GPU.

    python tests/gpu/prepare.py

leaves a bundle in ``.cache/gpu-suite`` (below 64 MiB, not in git), which ``tests/gpu/run.sh`` picks
up: a GPU machine without network or registry then has the real kernels at once, instead of
compiling for most of an hour. Building again only builds what is missing.

Needs here: nvcc 13.0 (``CUDA_HOME`` or ``PATH``), a C++ compiler, ninja, binutils, and in this
Python flashinfer-python 0.7.2.post1, apache-tvm-ffi and, for fa3, nvidia-curand (headers). No
libcuda: a stub takes its place for linking, and for a trial load of every library.

Expects there: a CUDA 13 driver, the Python versions of ``--python``, torch for CUDA 13 and the
pure-Python needs of ``flashinfer`` (checked by ``run.sh``, listed in ``NEEDED_THERE``).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 << 20
ARCHITECTURE = "9.0a"
XQA_GROUP = 4  # repage.selftest.attention.GROUP
NEEDED_THERE = (
    *("torch", "numpy", "requests", "tqdm", "packaging", "jinja2", "filelock", "pynvml"),
    *("einops", "tabulate", "click", "rich", "pytest", "hypothesis"),
)

# FlashInfer's own modules whose functions run in the suite; what they import late is taken along.
_USED = re.compile(
    r"^flashinfer\.(decode|prefill|xqa|page|utils|api_logging|compilation_context|cuda_utils"
    r"|jit\.(core|env|cpp_ext|utils|page|xqa|attention(\..*)?))$"
)
_PROBE = """
import json, sys
import flashinfer, flashinfer.decode, flashinfer.prefill, flashinfer.xqa, flashinfer.page
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
                  if name.split(".")[0] == "flashinfer" and getattr(module, "__file__", None)}))
"""
_LOAD = """
import sys, torch, tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
for name in sys.argv[2:]:
    getattr(module, name)
"""
_SPECS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import prepare
print(json.dumps({name: spec.is_aot for name, spec in prepare.module_specs().items()}))
"""


def module_specs() -> dict[str, object]:
    """The build specs of every kernel that the suite calls, from FlashInfer's own generators.

    Head dims 128 and 256; a window is a module of its own, built for head dim 128.
    """
    import torch
    from flashinfer.jit.attention import modules
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.xqa import gen_xqa_module

    bf16, int32 = torch.bfloat16, torch.int32
    sizes = ((128, False), (256, False), (128, True))
    specs: dict[str, object] = {"page": gen_page_module()}
    # The quick ones first: an interrupted run has them.
    for head_dim, window in sizes:
        suffix = f"hd{head_dim}{'-window' if window else ''}"
        for cache, dtype in (("bf16", bf16), ("fp8", torch.float8_e4m3fn)):
            for page in (64,) if window else (64, 16, 32, 128):
                specs[f"xqa-{cache}-p{page}-{suffix}"] = gen_xqa_module(
                    bf16, dtype, page, head_dim, XQA_GROUP, window, bf16
                )
    for kind in ("decode", "fa2", "fa3"):
        for head_dim, window in sizes:
            label = f"{kind}-hd{head_dim}{'-window' if window else ''}"
            shape = (bf16, bf16, bf16, int32, head_dim, head_dim, 0, window, False)
            if kind == "decode":
                specs[label] = modules.gen_batch_decode_module(*shape)
            elif kind == "fa2":
                # What prefill.get_batch_prefill_module loads for equal K and V strides.
                specs[label] = modules._gen_batch_prefill_primary_module("fa2", *shape, False)
            else:
                specs[label] = modules.gen_batch_prefill_module("fa3", *shape, False)
    return specs


def prepare_environment(build: Path) -> None:
    """Set what FlashInfer reads when it is imported."""
    cuda_home = _cuda_home()
    stub = build / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    # Shared libraries may leave symbols open: an empty libcuda will do. But it must be named
    # (--no-as-needed), or its functions are not found on the GPU machine.
    _compile_library(stub / "libcuda.so", "", "libcuda.so.1")
    os.environ.update(
        CUDA_HOME=str(cuda_home),
        FLASHINFER_CUDA_ARCH_LIST=ARCHITECTURE,
        FLASHINFER_WORKSPACE_BASE=str(build),
        FLASHINFER_EXTRA_LDFLAGS=f"-L{stub} -Wl,--no-as-needed -lcuda",
    )
    headers = _curand_headers(cuda_home)
    if headers is not None:
        os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = f"-I{headers}"


def _cuda_home() -> Path:
    """The toolkit's folder; the nvcc on PATH may be a link or a script elsewhere."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for folder in map(Path, filter(None, [*candidates, "/usr/local/cuda"])):
        if (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda.h").exists():
            return folder
    raise SystemExit("no CUDA toolkit with nvcc and cuda.h was found: set CUDA_HOME")


def _curand_headers(cuda_home: Path) -> Path | None:
    """CUTLASS, which fa3 includes, wants curand_kernel.h; small toolkits come without it."""
    folders = [cuda_home / "include"]
    for site in map(Path, sys.path):
        folders += sorted(site.glob("nvidia/*/include"))
    for folder in folders:
        if (folder / "curand_kernel.h").is_file():
            return None if folder == folders[0] else folder
    print("curand_kernel.h was not found: fa3 will not build (pip install nvidia-curand)")
    return None


def _compile_library(path: Path, source: str, soname: str) -> None:
    command = ["cc", "-shared", "-x", "c", "-", f"-Wl,-soname,{soname}", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def build_modules(pattern: str, jobs: int) -> dict[str, dict[str, object]]:
    """Build what matches and is missing, one module at a time; a failure is recorded."""
    os.environ["MAX_JOBS"] = str(jobs)
    report: dict[str, dict[str, object]] = {}
    for label, spec in module_specs().items():
        path = spec.jit_library_path
        entry: dict[str, object] = {"module": spec.name}
        if not path.exists() and not fnmatchcase(label, pattern):
            continue
        start = time.monotonic()
        try:
            if not path.exists():
                spec.build()
                entry["seconds"] = round(time.monotonic() - start, 1)
            entry |= {"bytes": path.stat().st_size, "path": str(path)}
        except Exception as error:
            entry["error"] = str(error)[-2000:]
        report[label] = entry
        text = entry.get("error") or f"{entry['bytes']} bytes, {entry.get('seconds', 'built')}"
        print(f"{label}: {text}", flush=True)
    return report


def undefined_symbols(path: Path) -> list[str]:
    """Symbols that the library takes from others."""
    output = _output("nm", "-D", "--undefined-only", str(path))
    return sorted({line.split()[-1].split("@")[0] for line in output.splitlines()})


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_loads(report: dict[str, dict[str, object]], build: Path) -> None:
    """Load every library for real, with a libcuda that always fails.

    Symbols are bound late: fa2 modules leave kernels for head dims from 512 on open.
    """
    symbols = set()
    for entry in report.values():
        if "path" in entry:
            symbols |= set(undefined_symbols(Path(str(entry["path"]))))
    driver = sorted(name for name in symbols if re.match(r"cu[A-Z]", name))
    folder = build / "stub-for-loading"
    folder.mkdir(exist_ok=True)
    # 3 is CUDA_ERROR_NOT_INITIALIZED.
    source = "".join(f"int {name}(void) {{ return 3; }}\n" for name in driver)
    _compile_library(folder / "libcuda.so.1", source, "libcuda.so.1")
    libraries = f"{folder}:{os.environ['CUDA_HOME']}/lib64"
    for label, entry in report.items():
        if "path" not in entry:
            continue
        functions = ["xqa_wrapper"] if label.startswith("xqa") else ["plan", "run"]
        if label.startswith("fa"):
            functions = ["plan", "paged_run"]
        if label == "page":
            functions = ["append_paged_kv_cache"]
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(entry["path"]), *functions],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            capture_output=True,
            text=True,
            check=False,
        )
        path = Path(str(entry["path"]))
        symbols_of_driver = [name for name in undefined_symbols(path) if name in driver]
        # What it does not name itself, it does not find: libcuda is not loaded globally.
        named = not symbols_of_driver or "[libcuda.so.1]" in _output("readelf", "-d", str(path))
        entry |= {"loads": named and done.returncode == 0, "driver_symbols": symbols_of_driver}
        if not entry["loads"]:
            print(f"{label}: does not load: {done.stderr[-500:] or 'libcuda is not named'}")


def copy_flashinfer(site: Path, report: dict[str, dict[str, object]]) -> None:
    """Copy the modules of the package that the suite imports, and the built kernels."""
    probed = json.loads(_output(sys.executable, "-c", _PROBE).splitlines()[-1])
    files = {name: Path(path) for name, path in probed.items()}
    package = files["flashinfer"].parent
    wanted = set(files.values())
    for name, path in files.items():
        if _USED.match(name):
            wanted |= _late_imports(name, path, package)
    for path in sorted(wanted):
        _copy(path, site / "flashinfer" / path.relative_to(package))
    csrc = package / "data" / "csrc"
    for path in sorted(csrc.iterdir()):
        # The generators render these templates and copy these sources before they look for a
        # built library.
        if path.is_file() and re.match(r"(batch_decode|batch_prefill|page|flashinfer_)", path.name):
            _copy(path, site / "flashinfer" / "data" / "csrc" / path.name)
    for entry in report.values():
        if entry.get("loads"):
            name = str(entry["module"])
            target = site / "flashinfer" / "data" / "aot" / name / f"{name}.so"
            _copy(Path(str(entry["path"])), target)
            subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)
    info = Path(str(importlib.metadata.distribution("flashinfer-python")._path))
    _copy(info / "METADATA", site / info.name / "METADATA")


def _late_imports(name: str, path: Path, package: Path) -> set[Path]:
    """Files of the package that a module imports anywhere, inside functions too."""
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            stem = [*base, *(node.module or "").split(".")] if node.module else base
            names = [".".join([*stem, alias.name]) for alias in node.names]
            names.append(".".join(stem))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for dotted in names:
            if dotted.split(".")[0] == "flashinfer":
                found |= _files_of(dotted.split(".")[1:], package)
    return found


def _files_of(parts: list[str], package: Path) -> set[Path]:
    files = set()
    for end in range(1, len(parts) + 1):
        stem = package.joinpath(*parts[:end])
        files |= {path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()}
    return files


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def copy_tvm_ffi(output: Path, versions: list[str]) -> None:
    """Fetch the compiled runtime of the kernels for each Python version, without its sources."""
    version = importlib.metadata.version("apache-tvm-ffi")
    for python in versions:
        wheels = output / "download"
        platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 28)]
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--implementation", "cp", "--python-version", python),
                *(word for name in platforms for word in ("--platform", name)),
                *("--dest", str(wheels), f"apache-tvm-ffi=={version}"),
            ],
            check=True,
        )
        site = _runtime_site(output, python)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith((".py", ".so", "/METADATA", "/dlpack.h")):  # repage needs it
                    archive.extract(member, site)
        shutil.rmtree(wheels)


def _runtime_site(output: Path, python: str) -> Path:
    return output / f"site-cp{python.replace('.', '')}"


def build_wheel(output: Path) -> str | None:
    """Build repage for this Python; another one builds it on the GPU machine."""
    environment = {**os.environ, "REPAGE_CUDA": "ON", "REPAGE_CUDA_ARCHITECTURES": "90-real"}
    command = [
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", str(output / "wheels"), "-C", f"build-dir={output}-build/wheel"),
    ]
    done = subprocess.run([*command, str(REPOSITORY)], env=environment, check=False)
    return None if done.returncode == 0 else "the wheel of repage did not build"


def cut_out_vllm(output: Path) -> str | None:
    """Take along what the benchmark compares with; a GPU machine may have no vLLM."""
    script = REPOSITORY / "benchmarks" / "vllm_code.py"
    command = [sys.executable, str(script), str(output / "vllm_pieces.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no code of vLLM: {done.stderr.strip()}"


def check_bundle(output: Path) -> list[str]:
    """Import FlashInfer from the bundle alone, find every kernel, and call each.

    With the bundle's runtime for this Python where there is one, else with the installed one.
    """
    runtime = _runtime_site(output, sysconfig.get_python_version())
    build = f"{output}-build"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{output / 'site'}:{runtime}",
        "LD_LIBRARY_PATH": f"{build}/stub-for-loading:{os.environ['CUDA_HOME']}/lib64",
        "FLASHINFER_WORKSPACE_BASE": f"{build}/check",
        "FLASHINFER_DISABLE_JIT": "1",
    }
    folder = Path(__file__).parent
    answers = []
    for command in (["-c", _SPECS, str(folder)], [str(folder / "reach_kernels.py")]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return [f"the trimmed package does not work: {done.stderr[-2000:]}"]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    found, reached = answers
    problems = [f"{label} is not in the bundle" for label, present in found.items() if not present]
    return problems + [f"{call}: {why}" for call, why in reached.items() if why]


def main() -> int:
    """Build, bundle and check; returns 1 when something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / ".cache" / "gpu-suite")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default 2)")
    parser.add_argument("--only", default="*", help="build modules whose label matches")
    parser.add_argument("--python", nargs="*", default=["3.12", sysconfig.get_python_version()])
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    build = Path(f"{output}-build")
    prepare_environment(build)
    report = build_modules(arguments.only, arguments.jobs)
    check_loads(report, build)
    shutil.rmtree(output, ignore_errors=True)
    copy_flashinfer(output / "site", report)
    copy_tvm_ffi(output, list(dict.fromkeys(arguments.python)))
    problems = [f"{label}: {e['error']}" for label, e in report.items() if "error" in e]
    problems += [f"{label} does not load" for label, e in report.items() if e.get("loads") is False]
    problems += [*filter(None, [build_wheel(output), cut_out_vllm(output)])]
    problems += check_bundle(output)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        problems.append(f"the bundle has {size} bytes, more than {LIMIT_BYTES}")
    manifest = {
        "flashinfer": importlib.metadata.version("flashinfer-python"),
        "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
        "architecture": ARCHITECTURE,
        "nvcc": _nvcc_version(),
        "needed_there": NEEDED_THERE,
        "bytes": size,
        "modules": {
            label: {key: value for key, value in entry.items() if key != "path"}
            for label, entry in report.items()
        },
        "problems": problems,
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2))
    print(f"{output}: {size / (1 << 20):.1f} MiB, {len(report)} modules")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def _nvcc_version() -> str:
    nvcc = Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    return _output(str(nvcc), "--version").splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
