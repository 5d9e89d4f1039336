"""How a target's forwards run: transformers as it is, CUDA graphs, or our CPU kernels.

target       a model with its engine, as users hold it; encoder_decoder, one with an encoder
trial        whether trees get the model's own logits, tried before the first token
base         the interface, and `Runner`, which runs a function of tensors as it is
by_device    the choice of an engine
model_engine forwards of the transformers model over a tree, with attention of our own
attention    that attention; headstart.heads.layers.tree_kernel, its Triton kernel for trees on a GPU
cuda_graph   functions of tensors, recorded once and replayed with one launch
known        decoders of Llama-like layers, recognised by their parts
fused_decoder  a known decoder between whose linear layers fused kernels run; branches, parallel ones of a graph
cpu          forwards in our CPU kernels (cpu_decoder, cpu_kernels)
stateful     forwards of models whose layers keep a state; counting, of those that count positions by the cache
"""
