"""An adapter for routers made for vLLM: vllm.grpc.engine.VllmEngine on the gRPC port, with --enable_vllm_api.

`composition` attaches it to a server, `service` translates each call into one of sluice.v1, and `tokenizer_zip` makes
GetTokenizer's response. `proto/` holds the supported part of the published protocol.
"""
