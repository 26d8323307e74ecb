"""TLS from the router to its replicas, with real certificates on real sockets."""

import json
import ssl

import openai

from server.lifecycle.host import HostOptions
from tests.server.harness import running
from tests.server.router.replica_stub import ReplicaStub, running_stubs
from tests.server.router.router_harness import running_router, wait_until
from tools.certificates import Authority, replace_file

CHAT = "/v1/chat/completions"


def start_tls_stub(
  stub: ReplicaStub, authority: Authority, days=(-1, 10), client_ca: Authority | None = None, **more
) -> None:
  """Has a stub listen again, with a certificate."""
  stub.stop()
  stub.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  stub.tls.load_cert_chain(*authority.issue("replica", days, **more))
  if client_ca is not None:
    stub.tls.load_verify_locations(client_ca.file)
    stub.tls.verify_mode = ssl.CERT_REQUIRED
  stub.start()


def trouble_of(router) -> str:
  """Returns why no replica takes requests, once a check has ended."""
  wait_until(lambda: router.value("sluice_router_probes_total") > 0)
  return router.http.post(CHAT, json={}).json()["error"]["message"]


def test_real_servers_with_mutual_tls(tokenizer, tmp_path):
  """Streams, checks, load and stored responses; then without the router's certificate."""
  authority = Authority(tmp_path)
  certificate, key = authority.issue("server")
  options = HostOptions(
    http_port=0, tls_cert_file=str(certificate), tls_key_file=str(key), tls_client_ca_file=str(authority.file)
  )
  own_certificate, own_key = authority.issue("router")
  own = {"client_cert_file": str(own_certificate), "client_key_file": str(own_key)}
  with running(tokenizer, host=options) as first, running(tokenizer, host=options) as second:
    names = [f"https://localhost:{each.host.http_port}" for each in (first, second)]
    with running_router(names, policy="round_robin", replica_ca_file=str(authority.file), **own) as router:
      router.wait_ready(2)
      with openai.OpenAI(
        base_url=f"{str(router.http.base_url).rstrip('/')}/v1", api_key="none", max_retries=0, timeout=30
      ) as client:
        texts = set()
        for _ in range(2):
          chunks = list(
            client.chat.completions.create(
              model="tiny", messages=[{"role": "user", "content": "the cat"}], max_tokens=20, temperature=0, stream=True
            )
          )
          texts.add("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))
        assert len(texts) == 1 and texts.pop()
        made = client.responses.create(model="tiny", input="the cat", max_output_tokens=5)
      assert min(each.engine.recorder.num_steps for each in (first, second)) > 0
      wait_until(lambda: "replica_running{" in router.http.get("/metrics").text)
    with running_router(names, replica_ca_file=str(authority.file), **own) as router:
      router.wait_ready(2)
      assert router.http.get(f"/v1/responses/{made.id}").json()["id"] == made.id, "found by search"
    with running_router(names[:1], replica_ca_file=str(authority.file)) as router:
      assert "if it requires a certificate, set the router's --client_cert_file" in trouble_of(router)
    plain = names[0].removeprefix("https://")
    with running_router([plain]) as router:
      assert f"if it has TLS, list it as https://{plain}" in trouble_of(router)


def test_troubles_name_the_remedy(tmp_path):
  authority, other = Authority(tmp_path), Authority(tmp_path, "other")
  with running_stubs(1) as [stub]:

    def check(words: str, name: str = "", **files) -> None:
      with running_router([name or stub.name], **{"replica_ca_file": str(authority.file)} | files) as router:
        assert words in trouble_of(router)

    check("list it without https://", f"https://{stub.name}")
    start_tls_stub(stub, authority, days=(-9, -1))
    check("its certificate has expired; renew")
    start_tls_stub(stub, authority, host="other.example")
    check("its certificate is not for 127.0.0.1; list")
    start_tls_stub(stub, authority)
    check("local issuer certificate); name its authority in --replica_ca_file", replica_ca_file=str(other.file))
    check("local issuer certificate); name its authority in --replica_ca_file", replica_ca_file="")
    start_tls_stub(stub, authority, client_ca=authority)
    certificate, key = other.issue("router")
    files = {"client_cert_file": str(certificate), "client_key_file": str(key)}
    check("--client_cert_file", **files)  # the alert may be lost with the connection
    check("requires a certificate")


def test_a_stream_that_breaks_within_tls(tmp_path):
  """The end of a connection without TLS's own end is no end of an answer."""
  authority = Authority(tmp_path)
  with running_stubs(1) as [stub]:
    start_tls_stub(stub, authority)
    with running_router([stub.name], replica_ca_file=str(authority.file)) as router:
      router.wait_ready(1)
      stub.mode = "end"
      text = router.http.post(CHAT, json={}).text
      assert text.startswith('data: {"n": 0}\n\n') and "replica_lost" in text
      router.wait_ready(1)
      stub.mode = "json"
      body = {"messages": [{"role": "user", "content": "a long prompt " * 20_000}]}
      assert router.http.post(CHAT, json=body).json()["from"] == stub.name
      assert json.loads(stub.seen[-1][3]) == body
      assert stub.seen[-1][2]["host"] == stub.name.removeprefix("https://")


def test_a_new_authority_is_read(tmp_path, caplog):
  authority, other = Authority(tmp_path), Authority(tmp_path, "other")
  with running_stubs(1) as [stub]:
    start_tls_stub(stub, authority)
    file = tmp_path / "trusted.pem"
    replace_file(file, other.file.read_bytes())
    with running_router([stub.name], replica_ca_file=str(file)) as router:
      assert "is not trusted" in trouble_of(router)
      assert f"{stub.name} takes no requests: its certificate is not trusted" in caplog.text
      replace_file(file, b"no certificate")
      replace_file(file, authority.file.read_bytes())
      router.wait_ready(1)
