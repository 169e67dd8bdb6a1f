# SPDX-License-Identifier: Apache-2.0
"""The image of the Dockerfile is built with buildah, looked into, and serves as an unprivileged user from a
read-only root. Needs root. Not seen here: limits of memory and CPU, seccomp, a network of its own.
"""
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest
from attend_client import Client
from support.container import Builder, ContainerError, command_in
from support.golden_cases import largest_difference
from support.servers import GOLDEN, ROOT, Process, cmake_version, free_ports, get

IMAGE = "localhost/attend:test"
CUDA_IMAGE = "localhost/attend:test-cuda"
CUDA_FILES = ("attend-engine-cuda.so", "libcublasLt.so.13", "libcudart.so.13")
BINARIES = ("/usr/local/bin/attend", "/usr/local/bin/attend-server")
TOOLS_OF_BUILDS = ("cc c++ gcc g++ cpp ld as make cmake ninja ccache pkg-config protoc strip git python3 pip curl wget"
                   ).split()
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def builder():
    if os.geteuid() != 0:
        pytest.skip("building an image takes root: run as root, or build it with `docker build .`")
    builder = Builder()
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def image(builder):
    """The image's configuration; building it is what takes the time of this file."""
    builder.build(IMAGE)
    return builder.config(IMAGE)


@pytest.fixture(scope="module")
def root(builder, image):
    """The root folder of a container."""
    with builder.container(IMAGE) as folder:
        yield folder


@pytest.fixture
def inside(root, image):
    """inside(WORDS): runs a program as the image's user, returns the finished process."""
    def call(*words, **options):
        return subprocess.run(command_in(root, image, words, **options), capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, check=False)
    return call


def runtime_packages():
    script = (ROOT / "deploy" / "install-dependencies.sh").read_text()
    return set(re.search(r"^runtime_packages=\(([^)]*)\)", script, re.MULTILINE)[1].split())


def test_the_dockerfile_is_clean():
    hadolint = ROOT / "build" / "venv" / "bin" / "hadolint"
    # DL3008 wants a version behind each package: Debian's security updates would then not be installed.
    done = subprocess.run([hadolint, "--ignore", "DL3008", ROOT / "Dockerfile"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cuda_is_built_where_nvcc_is_and_on_demand_only_there(tmp_path):
    """Configured as in a base without the toolkit, whatever this machine has."""
    def configure(device):
        return subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DATTEND_CUDA={device}",
                               "-DATTEND_TESTS=OFF", "-DCMAKE_IGNORE_PATH=/usr/local/bin;/usr/local/cuda/bin"],
                              capture_output=True, text=True, check=False,
                              env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    done = configure("ON")
    assert done.returncode != 0 and "there is no nvcc" in " ".join(done.stderr.split())
    done = configure("AUTO")
    assert done.returncode == 0 and "CUDA engine: not built" in done.stdout, done.stderr


def test_the_image_says_what_it_is_and_how_it_runs(image):
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in image["Labels"].items()}
    assert labels["version"] == cmake_version()
    assert labels["title"] == "attend" and labels["licenses"] == "Apache-2.0" and labels["description"]
    assert image["User"] == "10001:10001"
    assert set(image["ExposedPorts"]) == {"50051/tcp", "9464/tcp"}
    assert image["Entrypoint"] == ["attend-server"] and not image.get("Cmd")
    assert image["Healthcheck"]["Test"] == ["CMD", "attend-server", "--health"]
    assert {"ATTEND_LISTEN=0.0.0.0:50051", "ATTEND_METRICS_LISTEN=0.0.0.0:9464",
            "ATTEND_ALLOW_INSECURE=true"} <= set(image["Env"])


def test_the_image_has_the_size_its_dockerfile_states(builder, image):
    stated = int(re.search(r"about (\d+) MB", DOCKERFILE)[1])
    size = builder.megabytes(IMAGE)
    print(f"image: {size:g} MB")
    assert stated * 0.9 <= size <= stated * 1.1, f"the image has {size:g} MB, the Dockerfile says about {stated}"


def test_nothing_of_the_build_is_left_in_the_image(root):
    folders = [root / name for name in ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin")]
    assert not [str(folder / tool) for folder in folders for tool in TOOLS_OF_BUILDS if (folder / tool).exists()]
    assert sorted(path.name for path in (root / "usr/local/bin").iterdir()) == ["attend", "attend-server"]
    for folder in ("src", "tmp", "root", "mnt", "usr/local/lib", "var/tmp"):
        found = [path for path in (root / folder).rglob("*") if not path.is_dir()] if (root / folder).exists() else []
        assert not [path for path in found if path.name not in (".bashrc", ".profile")], folder
    kept = [path for folder in ("var/cache/apt", "var/lib/apt/lists") for path in (root / folder).rglob("*")]
    assert not [path for path in kept if path.is_file() and path.name != "lock"]
    packages = subprocess.run(["chroot", root, "dpkg-query", "-W", "-f", "${Package}\n"], capture_output=True,
                              text=True, check=True).stdout.split()
    assert not [name for name in packages if name.endswith(("-dev", "-doc"))]
    assert not list((root / "usr").rglob("*.a")) and not list((root / "usr").rglob("*.h"))
    for binary in BINARIES:
        symbols = subprocess.run(["nm", f"{root}{binary}"], capture_output=True, text=True, check=False)
        assert "no symbols" in symbols.stderr, f"{binary} is not stripped"


def test_each_runtime_package_holds_a_library_the_binaries_need_and_none_is_missing(root, inside):
    needed = set()
    for binary in BINARIES:
        assert "not found" not in inside("ldd", binary).stdout
        headers = subprocess.run(["objdump", "-p", f"{root}{binary}"], capture_output=True, text=True, check=True)
        needed |= set(re.findall(r"^ *NEEDED +(\S+)$", headers.stdout, re.MULTILINE))
    owners = subprocess.run(["chroot", root, "dpkg-query", "-S", *[f"*/{name}" for name in sorted(needed)]],
                            capture_output=True, text=True, check=True)
    owners = {line.partition(":")[0] for line in owners.stdout.splitlines()}
    assert runtime_packages() <= owners, f"not needed: {sorted(runtime_packages() - owners)}"


def test_both_programs_have_the_version_of_the_label(inside):
    assert cmake_version() in inside("attend-server", "--version").stdout
    done = inside("attend", "--help")
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr


def test_it_serves_as_nobody_in_particular_from_a_read_only_root(root, image, inside, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    for name in ("bert", "llama"):
        subprocess.run(["cp", "-r", GOLDEN / name, models], check=True)
    tmp_path.chmod(0o755)
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings = {"volume": models, "env": {
        "ATTEND_LISTEN": grpc, "ATTEND_METRICS_LISTEN": http, "ATTEND_MODEL": "bert=/mnt/bert;llama=/mnt/llama",
        "ATTEND_KV_BYTES": "64MiB", "ATTEND_THREADS": "2"}}
    health = image["Healthcheck"]["Test"][1:]
    for path in ("/tmp/f", "/mnt/f", "/home/f", "/run/f", "/dev/f", "/var/tmp/f", "/dev/shm/f"):
        assert "Read-only" in inside("touch", path, **settings).stderr, path
    assert inside("id", "-u").stdout == "10001\n"
    assert inside(*health, **settings).returncode == 1

    before = {path for path in root.rglob("*")}
    with Process(command_in(root, image, image["Entrypoint"], **settings), tmp_path / "server.log") as server:
        server.wait_for_log(r" serving ")
        assert inside(*health, **settings).returncode == 0
        status = dict(re.findall(r"^(\w+):\t(.*)$", open(f"/proc/{server.child.pid}/status").read(), re.MULTILINE))
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"10001"} and not status["Groups"].strip()
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
        assert status["Name"] == "attend-server"
        with Client(grpc, timeout=30, attempts=1) as client:
            for name in ("bert", "llama"):
                assert largest_difference(client, name) <= 1
            with client.open_session(model="llama") as session:
                width = client.models()[1].layers[0].d_model
                session.attend("0", np.ones((3, width), np.float32))
                assert session.length == 3
        assert f'attend_build_info{{version="{cmake_version()}"' in get(f"http://{http}/metrics")
        models_shown = inside("attend", "--server", grpc, "models")
        assert models_shown.returncode == 0 and "bert" in models_shown.stdout, models_shown.stderr
        server.signal()
        assert server.wait() == 0, server.log()
    assert "stopped" in server.log()
    assert {path for path in root.rglob("*")} == before


@pytest.mark.parametrize("device, complaint", [("cuda", "BUILD_BASE has no nvcc"), ("gpu", "allowed: cpu, cuda")])
def test_a_device_that_can_not_be_built_ends_the_build(builder, image, device, complaint):
    if not builder.layers:
        pytest.skip("without layers of the first build, this would install everything again")
    with pytest.raises(ContainerError) as failure:
        builder.build("localhost/attend:refused", DEVICE=device)
    assert complaint in " ".join(str(failure.value).split())


@pytest.fixture(scope="module")
def cuda_root(builder, image):
    """The root folder of a container of the image for GPUs."""
    toolkit = pathlib.Path("/usr/local/cuda").resolve()
    if not (toolkit / "bin" / "nvcc").exists():
        pytest.skip("this machine has no /usr/local/cuda/bin/nvcc")
    if not builder.layers:
        pytest.skip("without layers of the first build, this would install everything again")
    builder.build(CUDA_IMAGE, toolkit=toolkit, DEVICE="cuda")
    with builder.container(CUDA_IMAGE) as folder:
        yield folder


def test_the_cuda_image_adds_the_engine_and_the_libraries_it_needs(builder, image, cuda_root):
    assert builder.config(CUDA_IMAGE)["Entrypoint"] == image["Entrypoint"]
    folder = cuda_root / "usr/local/lib/attend"
    assert sorted(path.name for path in folder.iterdir()) == sorted(CUDA_FILES)
    assert not [path for path in (cuda_root / "usr/local").rglob("*") if path.name.startswith(("nvcc", "libcuda."))]
    found = subprocess.run(command_in(cuda_root, image, ["ldd", f"/usr/local/lib/attend/{CUDA_FILES[0]}"]),
                           capture_output=True, text=True, check=True).stdout
    assert "not found" not in found and "libcuda.so" not in found, found
    for name in CUDA_FILES[1:]:
        assert f"/usr/local/lib/attend/{name}" in found or f"/usr/local/lib/attend/./{name}" in found, found
    stated = int(re.search(r"with CUDA about (\d+) MB", DOCKERFILE)[1])
    size = builder.megabytes(CUDA_IMAGE)
    print(f"image with CUDA: {size:g} MB")
    assert stated * 0.9 <= size <= stated * 1.1, f"the image has {size:g} MB, the Dockerfile says about {stated}"


def test_the_cuda_image_serves_on_the_cpu_where_there_is_no_gpu(image, cuda_root, tmp_path):
    if list(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU; what the image does with one is tests/gpu's part")
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings = {"ATTEND_LISTEN": grpc, "ATTEND_METRICS_LISTEN": http, "ATTEND_KV_BYTES": "64MiB", "ATTEND_THREADS": "2"}
    command = command_in(cuda_root, image, image["Entrypoint"], env=settings)
    with Process(command, tmp_path / "server.log") as server:
        server.wait_for_log(r" serving ")
        lines = re.findall(r"^.* device .*$", server.log(), re.MULTILINE)
        assert len(lines) == 1 and "asked=auto using=cpu why=" in lines[0] and "driver" in lines[0].lower(), lines
        with Client(grpc, timeout=30, attempts=1) as client:
            assert client.server_info().engine == "cpu"
    done = subprocess.run([*command, "--device=cuda"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "driver" in done.stderr.lower(), done.stderr
