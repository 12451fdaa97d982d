"""The facts of a vLLM engine that has not started, for `kvtier identity`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier_core.config.model import IdentityConfig
from kvtier_core.types import Namespace
from kvtier_core.vllm.identity import model_weights, namespace
from kvtier_core.vllm.identity.model_weights import Unknown
from kvtier_core.vllm.identity.settings import UnidentifiedError


def of_arguments(model: str, identity: IdentityConfig, arguments: Sequence[str]) -> Namespace | Unknown:
    """The facts of an engine with these vLLM arguments that are known before it runs, or why it would not be served."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    config = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments])).create_engine_config()
    try:
        found = model_weights.identify_all(config, identity)
        if isinstance(found, Unknown):
            return found
        return Namespace.of(namespace.facts_before_start(config, found.fact))
    except (UnidentifiedError, ValueError) as error:
        return Unknown(str(error))
