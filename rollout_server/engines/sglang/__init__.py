"""The `sglang` engine: frontend in this process, schedulers as children, our weight loader inside.

engine         what the rollout server calls
requests       one answer over the parts that updates cut it into; versions of its tokens (pure)
process        SGLang itself: starts it, speaks to its tokenizer manager, watches its children
arguments      ServerArgs from the configuration
cpu            what must be in place before SGLang is imported where there is no GPU; scripts/sglang_cpu/ has it
schedulers     the orders that they carry out on their weights
update/        the last mile of a weight:
  orders       the folder through which the rollout server and its schedulers speak about an update
  loader       runs inside each scheduler: carries out an order between two forwards
  armed        whether decoding goes on there after an update
  live         what an update copies where, and the digests of what is live
  layout       inverse map: which rows of which live tensor hold a Hugging Face tensor
  receiver     runs inside the scheduler of rank 0: receives updates while it decodes
receiver_link  starts the receiver, and loads what it has staged
"""
