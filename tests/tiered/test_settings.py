"""The section [tiered], and credentials: where they come from, and where they never go."""

import os
from pathlib import Path

import pytest

from martlet.config import fill
from martlet.errors import ConfigError
from martlet_tiered.config import TieredConfig
from martlet_tiered.credentials import read_credentials
from martlet_tiered.location import TierLocation

from .stores import ENVIRON


def filled(**values: object) -> TieredConfig:
    return fill(TieredConfig, values, "tiered")


@pytest.mark.parametrize("url", ["", "s3://lake", "s3://lake/a/b", "gs://lake/a", "az://container/a", "/srv/tier"])
def test_these_places_are_accepted(url: str) -> None:
    assert filled(url=url).url == url


@pytest.mark.parametrize(
    "url", ["lake", "./tier", "s3:", "s3:///a", "http://lake", "s3://key:secret@lake", "s3://lake?x=1", "memory:///"]
)
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tiered\.url"):
        filled(url=url)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://127.0.0.1", "http://", "http://key:secret@127.0.0.1"])
def test_an_endpoint_is_the_url_of_a_server(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tiered\.endpoint"):
        filled(endpoint=endpoint)


def test_credentials_come_from_the_environment_or_from_a_private_file(tmp_path: Path) -> None:
    wanted = {"aws_access_key_id": "martlet-key-id", "aws_secret_access_key": "martlet-secret-key"}
    assert read_credentials("s3", "", {**ENVIRON, "HOME": "/root"}).reveal() == wanted
    path = tmp_path / "keys"
    path.write_text(
        "# of the cold tier\nAWS_ACCESS_KEY_ID = martlet-key-id\n\nAWS_SECRET_ACCESS_KEY=martlet-secret-key\n"
    )
    path.chmod(0o600)
    assert read_credentials("s3", str(path), {}).reveal() == wanted


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("AWS_ACCESS_KEY_ID=martlet-key-id\n")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"is open to other users; run: chmod 600 {path}"):
        read_credentials("s3", str(path), {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"AWS_ACCESS_KEY_ID\n", "no NAME=VALUE in line 1; names are AWS_ACCESS_KEY_ID"),
        (b"AWS_ACCESS_KEY_ID=a\nAWS_SECRET=b\n", "no NAME=VALUE in line 2"),
        (b"AWS_ACCESS_KEY_ID=\n", "no NAME=VALUE in line 1"),
        (b"AWS_ACCESS_KEY_ID=\xff\n", "is not UTF-8"),
    ],
)
def test_a_wrong_file_is_refused_without_its_values(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=why):
        read_credentials("s3", str(path), {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read; No such file or directory"):
        read_credentials("s3", str(tmp_path / "none"), {})


def test_credentials_of_file_and_environment_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=b\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="and so is AWS_SESSION_TOKEN; remove one of them"):
        read_credentials("s3", str(path), {"AWS_SESSION_TOKEN": "c"})


def test_a_directory_needs_no_credentials(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a local directory needs none"):
        read_credentials("file", str(tmp_path / "keys"), {})


def test_a_store_of_ones_own_needs_credentials() -> None:
    config = filled(url="s3://lake/a", endpoint="http://127.0.0.1:9000")
    with pytest.raises(ConfigError, match="needs credentials; set AWS_ACCESS_KEY_ID"):
        TierLocation.of(config, {})


def test_a_location_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"tiered\.url is empty"):
        TierLocation.of(filled(), {})


def test_an_endpoint_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no server; remove it"):
        TierLocation.of(filled(url=str(tmp_path), endpoint="http://127.0.0.1:9000"), {})


@pytest.mark.parametrize(
    ("settings", "environ", "region"),
    [
        ({}, {}, "us-east-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({}, {"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "eu-west-1"}, "eu-north-1"),
        ({"region": "eu-south-1"}, {"AWS_REGION": "eu-north-1"}, "eu-south-1"),
    ],
)
def test_the_region_is_that_of_the_settings_or_the_environment(
    settings: dict[str, str], environ: dict[str, str], region: str
) -> None:
    options = TierLocation.of(filled(url="s3://lake/a", **settings), environ).options
    assert options["aws_region"] == region
    assert options["aws_virtual_hosted_style_request"] == "false"


def test_an_account_of_azure_or_google_becomes_options() -> None:
    azure = {"AZURE_STORAGE_ACCOUNT_NAME": "lake", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}
    options = TierLocation.of(filled(url="az://container/a"), azure).options
    assert options == {"azure_storage_account_name": "lake", "azure_storage_account_key": "c2VjcmV0"}
    options = TierLocation.of(filled(url="gs://lake/a"), {"GOOGLE_SERVICE_ACCOUNT": "/etc/key.json"}).options
    assert options == {"google_service_account": "/etc/key.json"}


def test_no_repr_has_a_secret() -> None:
    location = TierLocation.of(filled(url="s3://lake/a"), ENVIRON)
    credentials = read_credentials("s3", "", ENVIRON)
    for text in (repr(location), str(location), repr(credentials), f"{credentials}"):
        assert not any(value in text for value in ENVIRON.values())
        assert "aws_access_key_id" in text
    assert not read_credentials("s3", "", {})


def test_a_file_may_be_read_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("AWS_ACCESS_KEY_ID=a\n")
    os.chmod(path, 0o400)
    assert read_credentials("s3", str(path), {})
