"""`version --verify`: exit codes, text and JSON."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release import SIGNER, SignedRelease, create_signed_release, write_release, write_sums
from tests.unit.cli.test_main import read_json, run_command


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "site-packages"
    (directory / "helper").mkdir(parents=True)
    for number in range(12):
        (directory / "helper" / f"module{number:02}.py").write_text(f"NUMBER = {number}\n")
    monkeypatch.setattr("helper.cli.version.packages_directory", lambda: directory)
    return directory


@pytest.fixture
def signed(tmp_path: Path, packages: Path) -> SignedRelease:
    names = sorted(str(file.relative_to(packages)) for file in packages.rglob("*.py"))
    return create_signed_release(tmp_path, packages, names)


def options(signed: SignedRelease) -> tuple[str, ...]:
    return ("--verify", "--manifest", str(signed.manifest), "--allowed-signers", str(signed.signers))


def test_verify_matching_files_exits_0(signed: SignedRelease, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("version", *options(signed)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"release 1.0.0, commit 5d2a5d2a5d2a, signed by {SIGNER}", "12 files match"]
    assert run_command("version", *options(signed), "--json") == 0
    result = read_json(capsys, "version")
    assert (result["release"]["signer"], result["release"]["matching"]) == (SIGNER, 12)
    assert result["circuits"].keys() == {"k10", "k11"}


def test_verify_paths_from_settings(signed: SignedRelease, capsys: pytest.CaptureFixture[str]) -> None:
    Path("helper.toml").write_text(
        f'[prover]\nrelease_manifest = "{signed.manifest}"\nallowed_signers = "{signed.signers}"\n'
    )
    assert run_command("version", "--verify") == 0
    assert "12 files match" in capsys.readouterr().out


def test_verify_differing_files_exits_1_and_names_them(
    signed: SignedRelease, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in packages.rglob("*.py"):
        file.write_text("changed")
    (packages / "helper" / "planted.so").write_bytes(b"")
    (packages / "helper" / "module03.py").unlink()
    assert run_command("version", *options(signed)) == 1
    output = capsys.readouterr().out
    assert output.count("changed: helper/module") == 10
    assert "changed: 1 more\n" in output
    assert "missing: helper/module03.py\nunlisted: helper/planted.so\n" in output
    assert run_command("version", *options(signed), "--json") == 1
    assert len(read_json(capsys, "version")["release"]["changed"]) == 11


def test_verify_differing_files_loads_no_native_code(signed: SignedRelease, packages: Path) -> None:
    script = (
        "import sys\n"
        "from helper.cli.main import main\n"
        "try:\n"
        "    main(['version', *sys.argv[1:]])\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'proofs' in sys.modules)\n"
    )
    # The real directory of the packages has other files than the release.
    result = subprocess.run(
        [sys.executable, "-c", script, *options(signed)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "1 False"


def test_verify_without_allowed_signers_exits_3(
    tmp_path: Path, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(file.relative_to(packages)) for file in packages.rglob("*.py")]
    manifest = write_release(tmp_path / "release", packages, names)
    assert run_command("version", "--verify", "--manifest", str(manifest)) == 3
    assert "signature not checked" in capsys.readouterr().out


def test_verify_shows_no_control_characters_of_an_unsigned_release(
    tmp_path: Path, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_release(tmp_path / "release", packages, [])
    manifest.write_text(manifest.read_text().replace("1.0.0", "1, signed\\n\\u001b[8m"))
    write_sums(manifest.parent)
    run_command("version", "--verify", "--manifest", str(manifest))
    assert "release 1, signed  [8m, commit" in capsys.readouterr().out


def test_verify_reads_no_file_outside_the_installation(
    tmp_path: Path, packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_release(tmp_path / "release", packages, [])
    manifest.write_text(manifest.read_text().replace('"files": {}', '"files": {"../outside": ""}'))
    write_sums(manifest.parent)
    assert run_command("version", "--verify", "--manifest", str(manifest)) == 1
    assert "a path is outside the directory" in capsys.readouterr().err


@pytest.mark.usefixtures("packages")
def test_verify_without_manifest_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("version", "--verify") == 2
    assert "--verify requires --manifest" in capsys.readouterr().err


def test_verify_unsigned_release_exits_1(signed: SignedRelease, capsys: pytest.CaptureFixture[str]) -> None:
    signed.manifest.with_name("SHA256SUMS.sig").unlink()
    assert run_command("version", *options(signed)) == 1
    assert "SHA256SUMS.sig cannot be read" in capsys.readouterr().err
