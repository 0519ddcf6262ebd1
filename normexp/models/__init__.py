"""Networks that receive a NormFactory and never ask which norm it is.

A network of one's own (`model=custom model._target_=my_pkg.MyNet`) is called with `norm` and with
those of input_shape, num_outputs, vocab_size and block_size that its signature names. It asks
`norm(C)` for the site of a map (N, C, *) and `norm.tokens(C)` for that of tokens (B, T, C), and has
forward(inputs), or forward(inputs, mask) for padded tokens. Where it has room for what surrounds a
norm, it asks for that too: `norm.act(C)`, `norm.conv(...)` and the others of `normexp.norms.slots`.
"""

from normexp.models.convnet import ConvNet
from normexp.models.gpt import GPT
from normexp.models.resnet import ResNet
from normexp.models.surgery import build_torchvision_model
from normexp.models.text_encoder import TextEncoder
from normexp.models.vit import ViT

__all__ = ["GPT", "ConvNet", "ResNet", "TextEncoder", "ViT", "build_torchvision_model"]
