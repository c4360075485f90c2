"""Software bill of materials of a release, in CycloneDX format: its Python, Rust and npm components.

The lock files are its source: `requirements/base.txt` and `postgres.txt`, `proofs/Cargo.lock` and
`ui/package-lock.json`. Tools that only build or test are not components of the release; `provenance.json` names them.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCHEMA_VERSION: Final = SchemaVersion.V1_6
_PIN: Final = re.compile(r"^([^\s#-][^\\\n]*?) *\\?$", re.MULTILINE)
_RUNTIME_KINDS: Final = frozenset({None, "build"})
"""Kinds of cargo dependencies whose code can be in the native module; "dev" is for tests only."""


class SbomError(Exception):
    """The bill of materials could not be created."""


def create_sbom(source: Path, *, version: str, wheel: Path, wheel_sha256: str, commit: str, epoch: int) -> str:
    """Return the bill of materials as JSON text. It depends only on the arguments and on the installed licenses.

    Args:
        source: directory of the sources.
        version: version of the package.
        wheel: the wheel that it describes.
        wheel_sha256: SHA-256 of the wheel (hex).
        commit: git commit of the sources.
        epoch: time of the commit, Unix seconds.

    Raises:
        SbomError: a lock file is not understood, or the result is invalid.
    """
    root = _component("pypi", "svote-helper", version, component_type=ComponentType.APPLICATION, license_text=None)
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=wheel_sha256))
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"svote-helper:{commit}:{wheel.name}"))
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.metadata.component = root
    direct: list[Component] = []
    for part in (python_part(source), rust_part(source), npm_part(source)):
        for key, component in part.components.items():
            bom.components.add(component)
            bom.register_dependency(component, [part.components[target] for target in part.edges[key]])
        direct += [part.components[key] for key in part.direct]
    bom.register_dependency(root, direct)
    text = make_outputter(bom, OutputFormat.JSON, SCHEMA_VERSION).output_as_string(indent=2) + "\n"
    problem = JsonStrictValidator(SCHEMA_VERSION).validate_str(text)
    if problem is not None:
        raise SbomError(f"the bill of materials is invalid: {problem}")
    return text


@dataclass(frozen=True, slots=True)
class SbomPart:
    """The components of one language.

    Attributes:
        components: by a key.
        edges: for each key those on which it depends.
        direct: those on which this package depends itself.
    """

    components: Mapping[str, Component]
    edges: Mapping[str, Sequence[str]]
    direct: Sequence[str]


def python_part(source: Path) -> SbomPart:
    """Return the pinned Python packages. Those that only a shared database needs are optional."""
    folder = source / "requirements"
    required = dict(_read_pins(folder / "base.txt"))
    pins = {**dict(_read_pins(folder / "postgres.txt")), **required}
    components, edges = {}, {}
    for name, version in sorted(pins.items()):
        component = _component("pypi", name, version, license_text=_python_license(name))
        component.scope = ComponentScope.REQUIRED if name in required else ComponentScope.OPTIONAL
        components[name] = component
        edges[name] = sorted(set(_requirement_names(metadata.requires(name) or ())) & pins.keys() - {name})
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["postgres"]]
    return SbomPart(components, edges, sorted(set(_requirement_names(declared))))


def rust_part(source: Path) -> SbomPart:
    """Return the crates of the native module, without those that only its tests need."""
    manifest = source / "proofs" / "Cargo.toml"
    host = re.search(r"^host: (\S+)$", _run("rustc", "-vV"), re.MULTILINE)
    if host is None:
        raise SbomError("rustc does not report its host")
    described = json.loads(
        _run(
            "cargo",
            "metadata",
            "--format-version=1",
            "--locked",
            f"--filter-platform={host[1]}",
            f"--manifest-path={manifest}",
        )
    )
    lock = tomllib.loads((manifest.parent / "Cargo.lock").read_text())
    checksums = {(package["name"], package["version"]): package.get("checksum") for package in lock["package"]}
    packages = {package["id"]: package for package in described["packages"]}
    edges = {
        node["id"]: sorted(
            dependency["pkg"]
            for dependency in node["deps"]
            if any(kind["kind"] in _RUNTIME_KINDS for kind in dependency["dep_kinds"])
        )
        for node in described["resolve"]["nodes"]
    }
    root = described["resolve"]["root"]
    reachable = _reachable(root, edges)
    components = {}
    for key in sorted(reachable):
        package = packages[key]
        license_text = (package["license"] or "").replace("/", " OR ")
        component = _component("cargo", package["name"], package["version"], license_text=license_text)
        checksum = checksums.get((package["name"], package["version"]))
        if checksum:
            component.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=checksum))
        components[key] = component
    return SbomPart(components, {key: edges[key] for key in components}, [root])


def npm_part(source: Path) -> SbomPart:
    """Return the npm packages whose code is in the web page."""
    lock = json.loads((source / "ui" / "package-lock.json").read_text())
    packages: Mapping[str, Mapping[str, Any]] = {
        path.rpartition("node_modules/")[2]: package
        for path, package in lock["packages"].items()
        if path and not package.get("dev")
    }
    components, edges = {}, {}
    for name, package in sorted(packages.items()):
        component = _component("npm", name, package["version"], license_text=package.get("license"))
        algorithm, _, digest = package.get("integrity", "").partition("-")
        if algorithm != "sha512":
            raise SbomError(f"ui/package-lock.json: {name} has no SHA-512")
        component.hashes.add(HashType(alg=HashAlgorithm.SHA_512, content=base64.b64decode(digest).hex()))
        components[name] = component
        edges[name] = sorted(set(package.get("dependencies", {})) & packages.keys())
    return SbomPart(components, edges, sorted(lock["packages"][""]["dependencies"]))


def _component(
    ecosystem: str,
    name: str,
    version: str,
    *,
    license_text: str | None,
    component_type: ComponentType = ComponentType.LIBRARY,
) -> Component:
    namespace, _, plain_name = name.rpartition("/")
    purl = PackageURL(ecosystem, namespace or None, plain_name, version)
    return Component(
        name=name,
        version=version,
        type=component_type,
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=[LicenseFactory().make_from_string(license_text)] if license_text else None,
    )


def _read_pins(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of the pins that apply to this platform, for which the wheel is built."""
    for match in _PIN.finditer(path.read_text()):
        requirement = Requirement(match[1])
        if requirement.marker is None or requirement.marker.evaluate():
            yield canonicalize_name(requirement.name), str(requirement.specifier).removeprefix("==")


def _requirement_names(requirements: Iterable[str]) -> Iterator[str]:
    """Yield the names of the requirements that apply without extras."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _python_license(name: str) -> str | None:
    """Return the license that an installed package declares, None if it is not one line."""
    fields = metadata.metadata(name)
    for key in ("License-Expression", "License"):
        if key in fields and "\n" not in fields[key]:
            return fields[key]
    return None


def _reachable(root: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [root]
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += edges[key]
    return reached


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
