"""Keys that do not go together, or not with what they are given: refused with key, value and way out, else accepted."""

import shlex

import pytest

from configs import ConfigError, load
from learner import rules
from learner.losses import LOSSES

SHORT = {
    "@staged": ["rollout.engine=sglang", "weight_bus.stage_in=engine"],
    "@wide": ["placement.tensor_parallel=2", "placement.split=2:1"],
    "@best": ["checkpoint.keep_best=1", "checkpoint.best_metric=val-core/sort6/greedy"],
    "@pg": ["algorithm.loss=policy_gradient"],
    "@gspo": ["algorithm.loss=gspo", "rollout.dtype=bfloat16"],
    "@gae": ["algorithm.advantage=gae"],
    "@kl": ["algorithm.kl=k3", "algorithm.kl_in=reward", "algorithm.advantage=rloo"],
    "@taught": ["teachers={big: {path: x}}", "algorithm.distillation=sampled"],
    "@inside": ["teachers={big: {path: x, where: learner}}", "algorithm.distillation=full"],
}
REFUSED = """
rollout.group_size=eight -> rollout.group_size | 'eight'
learner.lr=-1 -> learner.lr | greater than 0 | -1
rollout.engine=vllm -> rollout.engine | 'torch' or 'sglang' | 'vllm'
run.name=../x -> run.name | '../x'
'data.train={a: {path: x, weight: 2}, b: y}' -> data.train: 'b' has no weight | give every dataset a weight
run.dir= -> run.dir | at least 1 character
learner.betas=[0.9] -> learner.betas
learner.compute_dtype=float16 -> learner.compute_dtype | float16 is not offered | take bfloat16
'learner.betas=[0.9, 1.0]' -> learner.betas | from 0 to below 1
learner.batch_deadline_s=.inf -> learner.batch_deadline_s | infinite | 1e7
reward.timeout_s=.inf -> reward.timeout_s | infinite
rollout.top_k=50 -> rollout.top_k | 50
learner.minibatches=65 -> rollout.groups_per_step: 64 | learner.minibatches 65 | 65 groups or more
learner.target_kl=0.1 -> learner.target_kl: 0.1 | learner.minibatches or learner.epochs
learner.epochs=2 replay.async_lag=0 @pg -> 'policy_gradient' has no ratio | learner.minibatches × learner.epochs is 2
learner.epochs=2 @pg algorithm.proximal=current algorithm.correction=token_tis -> has no ratio | proximal=behaviour
rollout.groups_per_step=1 rollout.group_size=1 -> groups_per_step | fewer than 2 learner ranks
learner.offload_activations=true learner.recompute=selective -> offload_activations: true with learner.recompute
rollout.group_size=1 -> rollout.group_size: 1 | algorithm.advantage 'grpo' | take 2 or more
rollout.group_size=1 algorithm.advantage=reinforce++ algorithm.dynamic_sampling=true -> group_size: 1 | =none
learner.max_tokens_per_microbatch=20 -> learner.max_tokens_per_microbatch: 20 | 26
placement.split=0:2 -> placement.split: '0:2' | at least 1
placement.split=2:0 -> placement.split: '2:0' | at least 1
placement.split=two -> placement.split: 'two' | '6:2'
@wide rollout.engine=torch -> placement.tensor_parallel | on one device | rollout.engine=sglang
placement.split=3:2 placement.tensor_parallel=2 -> placement.tensor_parallel | 3 rollout devices
placement.rollout=node0:0-5 -> placement.learner | come together
placement.rollout=node0:0-5 placement.learner=node0:5 -> node0:5 | both sides | share_gpus
placement.rollout=node0:5-0 placement.learner=node1:0 -> '5-0' | backwards
placement.rollout=node0 placement.learner=node1:0 -> 'node0' | not of the form
placement.rollout=node0:0 placement.learner=node0:0,0 -> placement.learner | node0:0 | twice
'placement.rollout=;' placement.learner=node0:0 -> placement.rollout | names no device
placement.rollout=node0:0-2 placement.learner=node1:0 placement.tensor_parallel=2 -> node0 has 3 | span nodes
placement.share_gpus=true weight_bus.backend=nccl -> placement.share_gpus | 'nccl' | weight_bus.backend=gloo
learner.mesh.tensor=4 -> learner.mesh | tensor 4 × expert 1 = 4 | the 2 learner ranks | multiple of 4
placement.rollout=node0:0 'placement.learner=node1:0; node2:0' learner.mesh.tensor=2 -> of one node | node1 has 1
learner.mesh.tensor=2 learner.compile=true -> learner.mesh.tensor 2 | learner.compile=false
learner.collective_deadline_s=30 placement.split=1:2 -> collective_deadline_s: 30 | weight_bus.deadline_s 30 | take 60
replay.async_lag=0 replay.on_stale=substitute -> replay.on_stale: 'substitute' | take 'wait'
learner.lora.rank=4 rollout.dtype=bfloat16 -> rollout.dtype 'bfloat16' | 'float32' | one dtype
algorithm.correction=token_tis -> algorithm.correction: 'token_tis' truncates weights only | a correction that masks
replay.async_lag=9 -> replay.async_lag: 9 | take 8 or less
replay.async_lag=0 rollout.on_new_weights=keep_kv -> rollout.on_new_weights: 'keep_kv' | 'drain'
weight_bus.compression=zstd -> weight_bus.compression: 'zstd' | weight_bus.delta
weight_bus.transport=disk -> needs weight_bus.folder
weight_bus.stage_in=engine -> weight_bus.stage_in | rollout.engine 'torch' | rollout.engine=sglang
@staged weight_bus.transport=disk weight_bus.folder=/ -> stage_in | 'disk' | transport=collective
@staged weight_bus.backend=ucc -> weight_bus.stage_in | 'ucc' | weight_bus.backend=gloo or nccl
@staged @wide weight_bus.delta=true -> stage_in | 'gloo' | placement.tensor_parallel 2 | weight_bus.backend=nccl
rollout.engine=sglang weight_bus.stage_in=gpu -> weight_bus.stage_in
network.host=10.0.0.1 -> network.host: '10.0.0.1' | network.insecure
network.host=0.0.0.0 -> network.host | loopback
network.host=example.org -> network.host | loopback
checkpoint.keep_best=1 -> checkpoint.keep_best: 1 | checkpoint.best_metric | keep_best=0
@best evaluation.every_steps=0 -> checkpoint.keep_best | data.eval
@best checkpoint.every_steps=12 -> every 12 steps | evaluation.every_steps 5
@pg -> algorithm.loss | ppo_clip | i_know_this_is_biased
algorithm.overlong_buffer=11 -> algorithm.overlong_buffer: 11 | rollout.max_new_tokens 10 | such as 2
algorithm.overlong_buffer=2 algorithm.advantage=maxrl -> overlong_buffer 2 | 'maxrl'
algorithm.kl_in=reward -> kl_in: 'reward' | set algorithm.kl
algorithm.kl=k3 algorithm.kl_in=reward -> kl_in | 'grpo' | 'dr_grpo' | 'rloo' | kl_in 'loss'
algorithm.kl=k1 -> kl: 'k1' with kl_in 'loss' | 'k2' or 'k3', or kl_in 'reward'
@kl algorithm.dynamic_sampling=true -> kl_in: 'reward' with dynamic_sampling
@kl algorithm.advantage=maxrl -> kl_in | 'maxrl' | dr_grpo
@gae algorithm.dynamic_sampling=true -> 'gae' with dynamic_sampling | dynamic_sampling=none
@gae critic.warmup_steps=80 -> critic.warmup_steps: 80 | learner.total_steps 80
critic.path=/x -> critic.path: '/x' | algorithm.advantage=gae
algorithm.reference_refresh_steps=5 -> reference_refresh_steps | set algorithm.kl to k2 or k3
algorithm.reference_path=/x -> reference_path | set algorithm.kl to k2 or k3
algorithm.veto_high=1 -> veto_high: 1 | such as 100
algorithm.clip_low=0.1 -> algorithm.clip_low: unknown key
algorithm.loss=[ppo_clip] -> algorithm.loss: takes a name | {ppo_clip: {clip_high: 0.3}}
'algorithm.loss={ppo_clip: {}, gspo: {}}' -> algorithm.loss: takes a name
@pg algorithm.proximal=log_linear algorithm.correction=token_tis -> proximal: 'log_linear' | proximal 'behaviour'
@gspo -> algorithm.loss: 'gspo': clip_low 0.0003 | 0.0004 | set both to 0.02 | proximal=current
@gspo algorithm.proximal=log_linear algorithm.correction=token_tis -> algorithm.loss: 'gspo': clip_low 0.0003
@gspo algorithm.loss.gspo.clip_low=0.02 algorithm.loss.gspo.clip_high=0.004 -> clip_high 0.004 | at least 0.01
algorithm.loss=gspo learner.compute_dtype=bfloat16 -> algorithm.loss: 'gspo': clip_low 0.0003
@taught algorithm.distillation=full -> 'full' compares whole vocabularies | where: learner | 'top_k'
@inside algorithm.distillation=sampled -> teachers.big.where: 'learner' | take where: own, or distillation 'full'
@inside 'teachers={a: {path: x, where: learner, rows: {n: 1}}}' -> teachers.a.rows: {'n': 1} | leave it out
@inside 'teachers={a: {path: x, where: learner, context: "{prompt}"}}' -> teachers.a.context | take where: own
@inside placement.split=1:4 'learner.mesh={tensor: 2}' -> learner.mesh | teacher in the learner | take 'top_k'
@taught algorithm.distillation.sampled.coef_end=0.5 -> coef_end and over_steps make a schedule together; give both
@taught algorithm.distillation.sampled.over_steps=5 -> coef_end and over_steps make a schedule together; give both
@taught algorithm.distillation.sampled.coef=0 -> 'sampled': coef 0 distils nothing
@taught algorithm.dynamic_sampling=true -> 'sampled' with dynamic_sampling | take dynamic_sampling=none
@taught rollout.group_size=1 -> rollout.group_size: 1 | algorithm.advantage 'grpo'
data.eval={} -> data.eval: names no set; give at least one
data.eval=[a.jsonl] -> data.eval: give one file, or sets by name
"data.eval={'val core': x}" -> data.eval: 'val core' cannot name a set | take letters, digits
'data.eval={2024: x}' -> data.eval: 2024 cannot name a set | quote a name of digits alone
'data.eval={a: {path: x, temperature: 0}}' -> data.eval.a.temperature | greater than 0
'data.eval={a: {path: x, sample: 4}}' -> data.eval.a.sample: unknown key
'data.eval={a: {samples: 4}}' -> data.eval.a.path: missing
'data.eval={a: {path: x, greedy: false, sampled: false}, b: y}' -> data.eval.a: neither greedy nor sampled
'data.eval={a: {path: x, samples: 1000, max_new_tokens: 32768}}' -> data.eval.a: samples 1000 | take samples 170
evaluation.samples=4 evaluation.sampled=false -> evaluation.samples: 4 with evaluation.sampled false | sampled=true
learner.total_steps=0 data.eval=null -> learner.total_steps: 0 | nothing is evaluated; set data.eval
learner.total_steps=0 evaluation.every_steps=0 -> learner.total_steps: 0 | nothing is evaluated
'reward.function={numeric: {tolerence: 1}}' -> numeric: no option 'tolerence'; did you mean 'tolerance'?
reward.function={} -> reward.function | give a name, or names
reward.function=3 -> reward.function | give a name, or names with weights
'reward.function={length: {max_tokens: 5, min_tokens: 9}}' -> min_tokens 9 is above max_tokens 5
'reward.function={a.py:grade: 1, b/a.py:grade: 1}' -> reward | two parts are called 'a.grade'
'reward.function={numeric: {weight: .nan}}' -> numeric: weight nan is no finite number
'reward.function={exact: 0}' -> reward | every weight is 0
'reward.function={math: {seconds: 6}, code: 1}' -> math.seconds and function.code.wall_s: 31 s | do not fit
"reward.function={regex: {pattern: '('}}" -> reward | no regular expression
"reward.function={judge: {url: 'ftp://x', model: m}}" -> reward | is no address
"reward.function={judge: {url: 'http://x:0/v1', model: m}}" -> reward | has no port from 1 to 65535
"reward.function={judge: {url: 'https://me:word@x/v1', model: m}}" -> reward | has a password
"reward.function={judge: {url: 'https://x/v1', model: m, key_variable: sk-1}}" -> is no name of an environment variable
"reward.function={judge: {url: 'https://x/v1', model: m, scale: [5, 5]}}" -> reward | is no scale
algorithm.distillation=sampled -> algorithm.distillation: without a teacher
"teachers={big: {path: x}}" -> teachers: nothing uses them | set algorithm.distillation
"teachers={big: {}}" -> teachers.big | exactly one of path, of and url
"teachers={big: {path: x, of: lagged}}" -> teachers.big: path and of | exactly one
"teachers={big: {url: 'http://x:1/v1'}}" -> teachers.big: model: missing
"teachers={big: {url: 'x:1'}}" -> teachers.big.url | is no address
"teachers={me: {of: policy}}" -> teachers.me: context: missing
"teachers={me: {of: lagged, where: learner}}" -> teachers.me: where | folder alone
"teachers={big: {path: x, decay: 0.5}}" -> teachers.big: decay: does nothing with 'path'
"teachers={big: {path: x, where: learner, devices: 'node0:1'}}" -> devices: does nothing | where: 'learner'
"teachers={big: {path: x, devices: ''}}" -> teachers.big.devices | names no device
"teachers={big: {path: x, context: 'be brief'}}" -> teachers.big.context | has no {prompt}
"teachers={big: {path: x, context: '{prompt} {hint.text}'}}" -> {hint.text} is no name of a column
@taught "teachers={a@b: {path: x}}" -> 'a@b' cannot be a name
@taught "teachers={a: {path: x}, b: {path: y}}" -> teachers.a.rows: takes every prompt | 'b' is never asked
@taught "teachers={a: {path: x, where: learner, rows: {c: 1}}, b: {path: y}}" -> beside other teachers
@taught "teachers={a: {path: x, devices: 'node0:0'}}" -> node0:0 is given to others | share_gpus=true
@taught "teachers={a: {path: x, devices: 'node0:7;node0:7'}}" -> teachers.a.devices | names a device twice
data.held_out=x -> data.held_out: goes with | learner.objective sft or dpo
@taught 'algorithm.distillation={top_k: {k: 20000}}' -> network.max_message_bytes | top 20000 | smaller k
""".strip().splitlines()
ACCEPTED = """
learner.max_grad_norm=.inf
learner.total_steps=0
limits.growth_window_s=.inf
replay.async_lag=8
replay.async_lag=0 @pg
@pg algorithm.i_know_this_is_biased=true
@pg 'algorithm.correction={token_tis: {high: 1}}'
@staged
@staged weight_bus.backend=nccl
@staged @wide
@staged @wide weight_bus.backend=nccl
@staged weight_bus.delta=true
@best checkpoint.every_steps=20
network.host=localhost
network.host=127.9.9.9
network.host=::1
network.host=10.0.0.1 network.insecure=true
network.host=10.0.0.1 network.keys=keys
placement.split=0:2 placement.local_rollouts=false
placement.split=1:8 'learner.mesh={replicate: 2, tensor: 2}'
placement.rollout=node0:0-5 'placement.learner=node0:6-7; node1:0,2'
@gae rollout.group_size=1
@kl @gae
'algorithm.loss={cispo: {clip_high: 4}}'
algorithm.loss.ppo_clip.clip_dual=3 algorithm.veto_low=1e-4 algorithm.veto_high=100
algorithm.kl=k1 algorithm.kl_in=reward algorithm.advantage=dr_grpo
'algorithm.correction={icepop: {low: 0.5, high: 5}}'
@gspo 'algorithm.loss={gspo: {clip_low: 0.02, clip_high: 0.02}}'
@gspo algorithm.proximal=current algorithm.correction=token_tis
@gspo algorithm.i_know_this_is_biased=true
learner.minibatches=64 learner.epochs=4 learner.target_kl=0.1
learner.epochs=2 @pg algorithm.correction=token_tis
@taught algorithm.distillation.sampled.task=0 rollout.group_size=1
@taught 'algorithm.distillation={top_k: {k: 20, coef: 1.0, coef_end: 0, over_steps: 40}}'
@inside placement.split=1:2
@taught "teachers={a: {path: x, rows: {c: [1, 2]}, devices: 'node0:0'}, b: {of: average}}" placement.share_gpus=true
""".strip().splitlines()


def overrides_of(text: str) -> list[str]:
    return [override for word in shlex.split(text) for override in SHORT.get(word, [word])]


def refusal_of(overrides: list[str]) -> str:
    """What a file, or the variants that it chooses, are refused with; empty where they can train."""
    try:
        config = load("quickstart", overrides)
    except ConfigError as error:
        assert "quickstart.yaml" in str(error)
        return str(error)
    return next(rules.problems(config, rules.chosen(config)), "")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_key_value_and_way_out(case: str) -> None:
    text, words = case.split(" -> ")
    said = refusal_of(overrides_of(text))
    assert [word for word in words.split(" | ") if word not in said] == [], said


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_can_work_is_accepted(text: str) -> None:
    assert refusal_of(overrides_of(text)) == ""


@pytest.mark.parametrize("loss", LOSSES.built_in)
def test_every_loss_can_take_the_place_of_another_in_a_preset(loss: str) -> None:
    assert refusal_of([f"algorithm.loss={loss}", "algorithm.i_know_this_is_biased=true"]) == ""
