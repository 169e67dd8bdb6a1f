# SPDX-License-Identifier: Apache-2.0
"""Builds the image of the Dockerfile without an engine, with buildah, and runs programs in it.

container_test.py calls it; it knows nothing of attend. All it keeps lies in build/container: the base image, made
once with debootstrap and stored under the name the Dockerfile asks for, and the layers of earlier builds. The
packages come from where this machine's apt gets them, the compilations from its ccache.
"""
import contextlib
import json
import pathlib
import re
import shutil
import subprocess

from support.servers import ROOT

HOME = ROOT / "build" / "container"
BASE = "debian:bookworm-slim"
RELEASE = "bookworm"
# Above it, layers of earlier builds are thrown away; one build leaves 1000, with CUDA 2500.
STORAGE_LIMIT_MB = 6000
BUILD_SECONDS = 1500
# What the published slim image leaves out, so that ours has the size users get.
NOT_IN_SLIM = ("doc", "info", "lintian", "linda", "locale", "man", "groff")


class ContainerError(Exception):
    """buildah or debootstrap can't do it here; the message has their last lines."""


def run(*command, timeout=300, **options):
    """Standard output of a command; ContainerError with the end of what it printed when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
                          errors="replace", **options)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-25:]
        raise ContainerError(f"{' '.join(words)[:300]} exited {done.returncode}:\n" + "\n".join(lines))
    return done.stdout


def unmount_below(directory):
    """Unmounts what an ended or killed run left mounted in a folder, innermost first."""
    mounts = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, key=len, reverse=True):
        if mount.startswith(f"{directory}/"):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


class Builder:
    """buildah with a storage of its own. Overlay where the kernel lets us, else vfs, which copies every layer."""

    def __init__(self):
        (HOME / "tmp" / "buildah-cache").mkdir(parents=True, exist_ok=True)
        failures = []
        for driver in ("overlay", "vfs"):
            self.storage, self.layers = HOME / driver, driver == "overlay"
            self._buildah = ["buildah", "--storage-driver", driver, "--root", self.storage, "--runroot", HOME / "run"]
            try:
                with self.container("scratch"):
                    break
            except ContainerError as error:
                failures.append(str(error))
        else:
            raise ContainerError("\n".join(["buildah can't make containers on this machine:", *failures]))
        self.buildah("rm", "--all")  # of a run that was killed
        if int(run("du", "-sm", self.storage).split()[0]) > STORAGE_LIMIT_MB:
            self.buildah("rmi", "--all", "--force")
        self._share_ccache()

    def buildah(self, *words, **options):
        # The temporary files of a build are as large as its image: they belong here too.
        return run(*self._buildah, *words, env=self._environment(), **options)

    @staticmethod
    def _environment():
        # No locale: ccache would take each for another compiler.
        return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
                "TMPDIR": str(HOME / "tmp")}

    def close(self):
        with contextlib.suppress(ContainerError):
            self.buildah("rm", "--all")
        unmount_below(HOME)

    @staticmethod
    def _share_ccache():
        """The Dockerfile's cache mount is a folder below TMPDIR: a link makes it this machine's ccache."""
        cache = pathlib.Path(run("ccache", "--get-config", "cache_dir").strip())
        cache.mkdir(parents=True, exist_ok=True)
        link = HOME / "tmp" / "buildah-cache" / "ccache"
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(cache)

    @contextlib.contextmanager
    def container(self, image):
        """The root folder of a new container of an image."""
        name = self.buildah("from", "--pull-never", image).strip()
        try:
            yield pathlib.Path(self.buildah("mount", name).strip())
        finally:
            self.buildah("rm", name)

    def build(self, tag, toolkit=None, **arguments):
        """Builds the Dockerfile from the working tree, as `docker build .` would. Returns what was printed. `toolkit`
        is a folder shown at /usr/local/cuda: with it the base is one that has the CUDA Toolkit."""
        self._make_base()
        words = ["bud", "--isolation", "chroot", "--network", "host", "--pull-never", "--format", "docker",
                 f"--volume={self._apt()}:/etc/apt:ro", "--tag", tag]
        words += ["--layers"] if self.layers else []
        words += [f"--volume={toolkit}:/usr/local/cuda:ro"] if toolkit else []
        words += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        return self.buildah(*words, ROOT, timeout=BUILD_SECONDS)

    def config(self, image):
        """The image's configuration: User, Env, Labels and more."""
        return json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]

    def megabytes(self, image):
        number, unit = self.buildah("images", "--format", "{{.Size}}", image).split()
        return float(number) * {"KB": 1e-3, "MB": 1, "GB": 1e3}[unit]

    def _make_base(self):
        with contextlib.suppress(ContainerError):
            self.buildah("inspect", "--type", "image", BASE)
            return
        root = HOME / "base"
        unmount_below(root)
        shutil.rmtree(root, ignore_errors=True)
        try:
            mirror = next(uri for uri, release, _ in self._sources() if release == RELEASE)
            run("debootstrap", "--variant=minbase", RELEASE, root, mirror, timeout=BUILD_SECONDS)
            leftovers = ["etc/apt/sources.list", "etc/resolv.conf", "etc/hostname"]
            leftovers += [str(path.relative_to(root)) for folder in ("var/cache/apt/archives", "var/lib/apt/lists")
                          for path in (root / folder).glob("*") if path.is_file()]
            for name in leftovers:
                (root / name).unlink(missing_ok=True)
            rules = []
            for folder in NOT_IN_SLIM:
                shutil.rmtree(root / "usr/share" / folder, ignore_errors=True)
                rules.append(f"path-exclude /usr/share/{folder}/*\n")
            (root / "etc/dpkg/dpkg.cfg.d/docker").write_text("".join(rules))
            name = self.buildah("from", "scratch").strip()
            self.buildah("add", "--quiet", name, root, "/")
            self.buildah("config", "--cmd", '["bash"]', name)
            self.buildah("commit", "--quiet", name, BASE)
            self.buildah("rm", name)
        finally:
            unmount_below(root)
            shutil.rmtree(root, ignore_errors=True)

    @staticmethod
    def _sources():
        """(URI, release, component) of this machine's package sources of the base's release."""
        found = [line.split() for line in run("apt-get", "indextargets", "--format",
                 "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages").splitlines()]
        found = [one for one in found if one[1].startswith(RELEASE) and one[2] == "main"]
        if RELEASE not in (release for _, release, _ in found):
            raise ContainerError(f"apt has no source for {RELEASE} main: the base image can't be made")
        return found

    def _apt(self):
        """A folder to mount over /etc/apt: the base's, with this machine's sources and ways to reach them."""
        folder = HOME / "apt"
        shutil.rmtree(folder, ignore_errors=True)
        with self.container(BASE) as root:
            shutil.copytree(root / "etc" / "apt", folder)
        (folder / "sources.list").write_text("".join(f"deb {' '.join(source)}\n" for source in self._sources()))
        (folder / "apt.conf.d" / "99host").write_text(run("apt-config", "dump", "Acquire"))
        return folder


def command_in(root, config, words, env=None, volume=None):
    """The command line that does what an engine does for `docker run --read-only --cap-drop=ALL
    --security-opt=no-new-privileges`: the image's environment and user, every file read-only, nothing gained by
    setuid. `volume` is a folder shown, read-only, at /mnt. Its process is the program itself: signals reach it.
    """
    uid, _, gid = config["User"].partition(":")
    assert re.fullmatch(r"[1-9]\d*", uid) and gid, f"User is '{config['User']}'"
    variables = dict(one.split("=", 1) for one in config["Env"]) | (env or {})
    script = """
        root=$1 volume=$2
        shift 2
        mount --bind "$root" "$root"
        [ -z "$volume" ] || { mount --bind "$volume" "$root/mnt"; mount -o remount,bind,ro "$root/mnt"; }
        mount --bind /dev "$root/dev"
        mount --rbind /proc "$root/proc"
        mount --rbind /sys "$root/sys"
        mount -o remount,bind,ro "$root/dev"
        mount -o remount,bind,ro "$root"
        exec chroot "$root" "$@"
    """
    return ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script, "sh", root, volume or "",
            "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--inh-caps=-all",
            "--bounding-set=-all", "--no-new-privs", "env", "-i",
            *[f"{name}={value}" for name, value in variables.items()], *words]
