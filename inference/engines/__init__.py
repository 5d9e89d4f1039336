"""How a target's forwards run: transformers as it is, CUDA graphs, or our CPU kernels.

target           a model with its engine, as users hold it; the choice of the engine
encoder_decoder  a target with an encoder
trial            whether trees get the model's own logits, tried before the first token
base             the interface, and `Runner`, which runs a function of tensors
model_engine     forwards of the transformers model over a tree
masks            what the nodes of a tree attend to
attention        their attention; on a GPU heads.layers.tree_kernel attends to trees
cuda_graph       functions of tensors, recorded once and replayed with one launch
known            decoders of Llama-like layers, recognised by their parts
fused_decoder    a known decoder with fused kernels between its linear layers
cpu_decoder      forwards in our CPU kernels, cpu_kernels
stateful         forwards of models whose layers keep a state
counting         forwards of models that count positions by their cache
"""
