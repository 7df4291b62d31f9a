"""The `sglang` engine: frontend in this process, schedulers as children, our weight loader inside.

engine         what the rollout server calls
requests       one answer over the parts that updates cut it into; versions of its tokens (pure)
process        SGLang itself: starts it, speaks to its tokenizer manager, watches its children
arguments      ServerArgs from the configuration
cpu            what must be in place before SGLang is imported where there is no GPU; stand_ins/ has it
update/        the last mile of a weight: orders, loader, live, layout, receiver
receiver_link  starts the receiver, and loads what it has staged
direct         its schedulers as members of a group of the weight bus (weight_bus.apply: direct)
"""
