"""Valid settings, and where the store is found with them."""

from pathlib import Path

import pytest
from servers.s3 import environment
from tier_settings import SECRET, TierSettings

from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes, Seconds
from kvtier_s3.config import S3Config
from kvtier_s3.opening import connect


@pytest.fixture(autouse=True)
def _of_nobody():
    with environment():
        yield


def connected(config):
    """The settings of obstore, and the facts."""
    bucket, facts = connect(config, Seconds(5))
    return bucket._store, facts


class TestSettings(TierSettings):
    type = "s3"
    accepted = (
        (
            "bucket: b-1, prefix: a/b, endpoint: 'https://store:9000', region: eu-west-3, addressing: path, "
            "profile: work, sse: 'aws:kms', kms_key: k/1, ca: /etc/ca.pem, part: 16MiB, requests: 8, unsigned: off",
            {
                "bucket": "b-1",
                "prefix": "a/b",
                "endpoint": "https://store:9000",
                "region": "eu-west-3",
                "addressing": "path",
                "profile": "work",
                "sse": "aws:kms",
                "kms_key": "k/1",
                "ca": Path("/etc/ca.pem"),
                "part": Nbytes(16 << 20),
                "requests": 8,
                "unsigned": "off",
            },
        ),
    )
    refused = (
        ("bucket: a/b", "bucket", "'a/b' is not a valid bucket name"),
        (r'bucket: "a\r\nb"', "bucket", r"'a\r\nb' is not a valid bucket name"),
        ("bucket: '?list'", "bucket", "'?list' is not a valid bucket name"),
        ("bucket: b-1, prefix: ''", "prefix", "'' is not a valid prefix"),
        ("bucket: b-1, prefix: /a", "prefix", "'/a' is not a valid prefix"),
        ("bucket: b-1, prefix: a//b", "prefix", "'a//b' is not a valid prefix"),
        ("bucket: b-1, prefix: a/../b", "prefix", "'a/../b' is not a valid prefix"),
        ("bucket: b-1, prefix: ä b", "prefix", "'ä b' is not a valid prefix"),
        ("bucket: b-1, endpoint: 'host:9000'", "endpoint", "an endpoint must be https://HOST:PORT, without"),
        (
            f"bucket: b-1, endpoint: 'https://user:{SECRET}@host'",
            "endpoint",
            "an endpoint must be https://HOST:PORT, without",
        ),
        ("bucket: b-1, endpoint: 'https://host/path'", "endpoint", "an endpoint must be https://HOST:PORT, without"),
        (
            r'bucket: b-1, region: "a\r\nx-amz-acl: public-read"',
            "region",
            r"'a\r\nx-amz-acl: public-read' is not a valid region",
        ),
        (r'bucket: b-1, kms_key: "a\nb"', "kms_key", r"'a\nb' is not a valid kms_key"),
        ("bucket: b-1, part: 1MiB", "part", "'part' must be at least 5MiB"),
        ("bucket: b-1, requests: 0", "requests", "'requests' must be"),
        ("bucket: b-1, requests: 10000", "requests", "'requests' must be"),
    )


@pytest.mark.parametrize(
    "setting, url, by_host",
    [
        ({}, "https://b-1.s3.eu-west-3.amazonaws.com", True),
        ({"addressing": "path"}, "https://s3.eu-west-3.amazonaws.com", False),
        ({"bucket": "b.1"}, "https://s3.eu-west-3.amazonaws.com", False),
        ({"bucket": "b.1", "addressing": "virtual"}, "https://b.1.s3.eu-west-3.amazonaws.com", True),
        ({"endpoint": "http://store:9000"}, "http://store:9000", False),
        ({"endpoint": "https://store", "addressing": "virtual"}, "https://b-1.store", True),
        ({"endpoint": "http://[::1]:9000/"}, "http://[::1]:9000", False),
        ({"region": "cn-north-1"}, "https://b-1.s3.cn-north-1.amazonaws.com.cn", True),
    ],
)
def test_where_the_bucket_is_named(setting, url, by_host):
    store, _ = connected(S3Config(**{"bucket": "b-1", "region": "eu-west-3", **setting}))
    assert (store.config["endpoint"], store.config["virtual_hosted_style_request"]) == (url, str(by_host).lower())


def test_the_environment_names_region_and_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    store, _ = connected(S3Config(bucket="bucket"))
    assert store.config["endpoint"] == "https://bucket.s3.ap-south-1.amazonaws.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store:9000")
    store, facts = connected(S3Config(bucket="bucket"))
    assert (store.config["endpoint"], facts["addressing"]) == ("http://store:9000", "auto -> path")


@pytest.mark.parametrize(
    "endpoint, asked, told",
    [
        ("https://store", "auto", "auto -> on"),
        ("http://store", "auto", "auto -> off"),
        ("http://127.0.0.1:9", "auto", "auto -> on"),
        ("http://localhost.example:9", "auto", "auto -> off"),
        ("http://store", "on", "on -> on"),
        ("https://store", "off", "off -> off"),
    ],
)
def test_payloads_are_signed_unless_something_else_protects_them(endpoint, asked, told):
    _, facts = connected(S3Config(bucket="bucket", endpoint=endpoint, unsigned=asked))
    assert facts["unsigned"] == told


def test_writes_ask_for_encryption():
    store, _ = connected(S3Config(bucket="bucket", sse="aws:kms", kms_key="key-1"))
    assert (store.config["server_side_encryption"], store.config["sse_kms_key_id"]) == ("aws:kms", "key-1")


def test_an_endpoint_of_the_environment_does_not_replace_that_of_the_setting(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://other:9000")
    store, _ = connected(S3Config(bucket="bucket", endpoint="http://store:9000"))
    assert "http://other:9000" not in store.config.values()


def test_an_endpoint_of_the_environment_with_a_path_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store:9000/path")
    with pytest.raises(BackendError, match="HOST:PORT"):
        connected(S3Config(bucket="bucket"))
