"""Model folders before a run: files, headers, and whether the run's lengths and mesh fit. Imports no torch."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.errors import Contradiction, InputMissing
from configs.schema import Config
from learner.beside.folders import beside, check_folders
from learner.checkpoints.folders import MARK, incomplete
from learner.policy.divisibility import problem_with
from slipstream.check.pictures import problem_with_pictures
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes
from slipstream.families.table import family_of
from slipstream.runtime.fingerprint import model_fingerprint, read_json


def check_policy(config: Config) -> None:
    """The policy's folder, and the reference's and the critic's.

    Raises:
        ConfigError: model folder missing, weights cut short, too few positions, or sizes that learner.mesh does not
            divide.
        FingerprintError: a file of the model folder is missing or broken.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        local = config.model.path
        of_hub = len(folder.parts) == 2 and not folder.parent.is_dir() and folder.parent.name not in ("..", "models")
        repository, local = (local, f"models/{folder.name}") if of_hub else (f"OWNER/{folder.name}", local)
        raise InputMissing(
            f"model.path: no folder {config.model.path!r}; give a Hugging Face folder with config.json, safetensors and"
            f" a tokenizer; of a model of the Hub: hf download {repository} --local-dir {local}"
        )
    checkpoint = folder.parent if folder.name == "hf" else folder
    if any((checkpoint / name).exists() for name in ("dcp", "state.json", MARK)) and (reason := incomplete(checkpoint)):
        raise InputMissing(
            f"model.path: checkpoint {checkpoint} is not complete ({reason}); its run clears or completes it with"
            " --resume; take another step_N beside it"
        )
    check_weights(folder, "model.path")
    model_fingerprint(config.model.path, config.model.chat_template)
    raw = read_json(folder / "config.json")
    try:
        family = family_of(raw)
    except LookupError as error:
        raise InputMissing(f"model.path: {folder} {error.args[0]}") from error
    if config.rollout.facts.has_own_decoder and not family.in_torch_engine:
        raise Contradiction(
            f"rollout.engine: {config.rollout.engine!r} does not compute a {family.model_type} model; take sglang"
        )
    model = decoder_of(raw)
    if problem := problem_with_pictures(config, raw) or problem_with(
        config.learner, model, config.algorithm.router_aux_loss_coef
    ):
        raise Contradiction(problem)
    limit, prompt = model.get("max_position_embeddings"), config.data.max_prompt_tokens
    answers = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    answers |= {f"{one.key}: max_new_tokens": one.max_new_tokens for one in config.evaluation_sets}
    for key, answer in answers.items():
        if isinstance(limit, int) and prompt + answer > limit:
            raise Contradiction(
                f"{key}: {answer} after data.max_prompt_tokens {prompt} are {prompt + answer} tokens, and"
                f" {folder / 'config.json'} has max_position_embeddings {limit}; lower one of them"
            )
    if problem := Sizes.of(model).problem_with_ends(config.max_context):
        raise Contradiction(problem)
    check_folders(config)
    for key, path in beside(config).items():
        check_weights(Path(path), key)


def check_weights(folder: Path, key: str) -> None:
    """Files are there, and as long as their headers say."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputMissing(
            f"{key}: {str(folder)!r} has no *.safetensors file; copy or download the folder again, or save the model"
            " with save_pretrained"
        )
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputMissing(f"{key}: {file} is broken ({error}); copy or download the file again") from error
