"""The real servers run, and answer plain requests: reads of ranges, conditions and wrong credentials."""

import re
import urllib.request

import pytest

from fst_bench.servers.request import request

DATA = bytes(range(256)) * 16
RANGE = {"range": "bytes=100-199"}


def test_nginx(nginx, authority):
    nginx.put("servers/m", DATA)
    for url, context in ((nginx.url("servers/m"), None), (nginx.tls_url("servers/m"), authority.client_context())):
        answer = request("GET", url, RANGE, context=context)
        assert (answer.status, answer.body) == (206, DATA[100:200])
        assert request("GET", url, {"if-match": answer.headers["etag"]}, context=context).body == DATA
        assert request("GET", url, {"if-match": '"other"'}, context=context).status == 412


@pytest.mark.parametrize("tls", [False, True])
def test_redis(redis, tls):
    redis.put("m", DATA)
    assert redis.get("m") == DATA
    assert redis.call("GETRANGE", "m", "100", "199", tls=tls) == DATA[100:200]
    assert redis.get("other") is None
    with pytest.raises(ConnectionError, match="ERR unknown command"):
        redis.call("NOTHING", tls=tls)


def test_s3(s3, authority):
    etag = s3.put("servers/a name", DATA)
    answer = s3.get("servers/a name", headers=RANGE | {"if-match": etag})
    assert (answer.status, answer.body, answer.headers["etag"]) == (206, DATA[100:200], etag)
    assert s3.get("servers/a name", headers={"if-match": '"other"'}).status == 412
    assert s3.keys("servers/") == ["servers/a name"]
    presigned = s3.presigned_url("servers/a name")
    assert request("GET", presigned, RANGE).body == DATA[100:200]
    assert request("HEAD", presigned).status == 403
    assert request("GET", presigned[:-1] + ("0" if presigned[-1] != "0" else "1")).status == 403
    assert request("GET", f"{s3.endpoint}/{s3.bucket}/servers/a%20name").status == 403
    s3.put("m", DATA, bucket=s3.public_bucket)
    for endpoint, context in ((s3.endpoint, None), (s3.tls_endpoint, authority.client_context())):
        assert request("GET", f"{endpoint}/{s3.public_bucket}/m", context=context).body == DATA
    assert request("PUT", f"{s3.endpoint}/{s3.public_bucket}/m", body=b"other").status == 403
    assert request("PUT", f"{s3.endpoint}/{s3.open_bucket}/m", body=DATA).status == 200
    assert s3.get("m", s3.open_bucket).body == DATA


def test_s3_multipart_uploads(s3):
    path = f"{s3.bucket}/parts"
    started = s3.request("POST", path, {"uploads": ""}).successful().body.decode()
    upload = {"uploadId": re.findall("<UploadId>(.*)</UploadId>", started)[0]}
    assert s3.uploads() == ["parts"]
    assert s3.get("parts").status == 404
    data = DATA * (5 << 20 >> 12) + b"last"
    parts = [data[: 5 << 20], data[5 << 20 :]]
    listed = ""
    for number, part in enumerate(parts, 1):
        answer = s3.request("PUT", path, upload | {"partNumber": str(number)}, part).successful()
        listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{answer.headers['etag']}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    s3.request("POST", path, upload, body).successful()
    assert s3.get("parts").body == data
    assert s3.uploads() == []


def test_gcs(gcs):
    generation = gcs.put("servers/m", DATA)
    answer = gcs.get("servers/m", RANGE)
    assert (answer.status, answer.body) == (206, DATA[100:200])
    assert answer.headers["x-goog-generation"] == generation
    assert gcs.keys("servers/") == ["servers/m"]


def test_azure(azure):
    etag = azure.put("servers/m", DATA)
    answer = azure.get("servers/m", RANGE | {"if-match": etag})
    assert (answer.status, answer.body, answer.headers["etag"]) == (206, DATA[100:200], etag)
    assert azure.get("servers/m", {"if-match": '"other"'}).status == 412
    assert azure.names("servers/") == ["servers/m"]
    url = f"{azure.endpoint}/{azure.container}/servers/m"
    assert request("GET", url).status in (401, 403, 404)
    with urllib.request.urlopen(f"{url}?{azure.shared_access_signature()}") as signed:
        assert signed.read() == DATA
