"""Base images for the container files, made from Debian: no image registry is needed.

They stand in for the official images of Python, Rust and PostgreSQL, and have what the project uses of those: users,
directories, volumes, variables and entry points (as in docker-library/repo-info). The rest is Debian: its Python, its
PostgreSQL, and the Rust toolchain of this machine, mounted during builds.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.deploy.commands import run
from tests.deploy.debian_root import debian_root
from tests.deploy.podman import Podman

PACKAGES = ("ca-certificates", "netbase", "python3", "python3-venv", "tzdata")
"""What the official image of Python adds to Debian, and Python."""
REGISTRY_SETTINGS = ("etc/apt/apt.conf.d/90host", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
"""Files of a Debian root with this machine's settings for registries (`debian_root`). Builds mount them."""
CARGO_SETTINGS = "usr/local/cargo/config.toml"
TOOLCHAIN = "usr/local/rust"
TARGET = "usr/local/target"
CLIENT_VARIABLES = re.compile(r"UV_\w*INDEX\w*|CARGO_(HTTP|NET|REGISTRIES|REGISTRY)_\w+")

PYTHON = f"""
FROM localhost/debian
RUN update-ca-certificates && ln -s /usr/bin/python3 /usr/local/bin/python \
 && mkdir -p /{TOOLCHAIN} /{TARGET} /usr/local/cargo && touch /{CARGO_SETTINGS} /etc/pip.conf /etc/apt/apt.conf.d/90host
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python3"]
"""
RUST = f"""
FROM localhost/python
ENV CARGO_HOME=/usr/local/cargo CARGO_TARGET_DIR=/{TARGET} SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    PATH=/{TOOLCHAIN}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
POSTGRES_ENTRYPOINT = r"""#!/bin/sh
# Creates the database on the first start, as the entry point of the official image does, with a temporary server.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --auth-local=trust --auth-host="$POSTGRES_HOST_AUTH_METHOD"
  pg_ctl --wait --options "-c listen_addresses=''" start
  createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl --wait --mode fast stop
fi
exec "$@"
"""
POSTGRES = r"""
FROM localhost/python
RUN groupadd -r postgres --gid=999 \
 && useradd -r -g postgres --uid=999 --home-dir=/var/lib/postgresql --shell=/bin/sh postgres \
 && mkdir -p /etc/postgresql-common && echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf \
 && apt-get update && apt-get install -y --no-install-recommends postgresql-15 && rm -rf /var/lib/apt/lists/* \
 && install -d -o postgres -g postgres -m 3777 /run/postgresql \
 && install -d -o postgres -g postgres -m 1777 /var/lib/postgresql/data
COPY --chmod=755 docker-entrypoint.sh /usr/local/bin/
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/postgresql/15/bin \
    PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
ENTRYPOINT ["docker-entrypoint.sh"]
STOPSIGNAL SIGINT
CMD ["postgres"]
"""


PYTHON_IMAGE, RUST_IMAGE, POSTGRES_IMAGE = "localhost/python", "localhost/rust", "localhost/postgres"


def build_base_images(podman: Podman, directory: Path) -> None:
    """Build the images, and let builds access registries as this machine does. Unchanged layers are cached."""
    root = debian_root(PACKAGES)
    _import_root(podman, root)
    podman.build("build", "--layers", "--tag", "python", "-", stdin=PYTHON)
    podman.build_volumes += [f"{root / name}:/{name}:ro" for name in REGISTRY_SETTINGS]
    podman.build_volumes += [f"{_toolchain()}:/{TOOLCHAIN}:ro"]
    target = directory / "target"  # a cache for the next build
    target.mkdir(exist_ok=True)
    podman.build_volumes += [f"{target}:/{TARGET}"]
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    settings = [file for name in ("config.toml", "config") if (file := cargo_home / name).is_file()]
    podman.build_volumes += [f"{file}:/{CARGO_SETTINGS}:ro" for file in settings[:1]]
    variables = [f"--env={name}={value}" for name, value in os.environ.items() if CLIENT_VARIABLES.fullmatch(name)]
    context = directory / "postgres"
    context.mkdir(parents=True, exist_ok=True)
    (context / "docker-entrypoint.sh").write_text(POSTGRES_ENTRYPOINT)
    podman.build("build", "--layers", "--tag", "rust", *variables, "-", stdin=RUST)
    (context / "Containerfile").write_text(POSTGRES)
    podman.build("build", "--layers", "--tag", "postgres", context)


def _import_root(podman: Podman, root: Path) -> None:
    name = f"localhost/debian:{root.name}"
    if not podman.has_image(name):
        excluded = [f"--exclude=./{path}" for path in (*REGISTRY_SETTINGS, "dev/*", "var/lib/apt/lists/*")]
        with subprocess.Popen(["tar", "-C", root, *excluded, "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
            subprocess.run(
                ["podman", "import", "--quiet", "-", name],
                env=podman.environment,
                stdin=archive.stdout,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=300,
            )
        assert archive.returncode == 0
    podman.output("tag", name, "localhost/debian")


def _toolchain() -> Path:
    return Path(run(["rustc", "--print", "sysroot"]).strip())
