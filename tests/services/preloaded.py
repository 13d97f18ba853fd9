"""What a process that services are forked from has imported."""

import transformers.models.llama.modeling_llama
import typer

import draft_service.drafters.loading
import draft_service.server
import draftwood.rpc.serve
import router.server
import verifier_service.server

__all__ = ["draft_service", "draftwood", "router", "transformers", "typer", "verifier_service"]
