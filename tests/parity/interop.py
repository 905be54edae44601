#!/usr/bin/env python3
"""The seed network with batch normalisation in PyTorch, for files that pass between the two programs.

  interop.py record DIR           writes the recorded files that ../parity tests read
  interop.py exchange OURS DIR    writes DIR/weights, which are random, and DIR/io, images and what
                                  this network makes of them; loads the file OURS strictly, and
                                  writes DIR/scores: what it makes of the same images

Files are safetensors, written and read with the package of that name if it is there, else by a few
lines that stand here. Images are U8 [n, 28, 28], scores F64 [n, 10]. Exit status 77: no torch here.
"""

import json
import struct
import sys

try:
    import torch
except ImportError:
    sys.exit(77)
import torch.nn.functional as F
from torch import nn

try:
    from safetensors.torch import load_file, save_file
except ImportError:
    TYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U8": torch.uint8}
    NAMES = {dtype: name for name, dtype in TYPES.items()}

    def load_file(path):
        with open(path, "rb") as file:
            data = bytearray(file.read())
        (length,) = struct.unpack("<Q", data[:8])
        header, tensors = json.loads(data[8:8 + length]), {}
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = torch.frombuffer(data[begin:end], dtype=TYPES[entry["dtype"]]).reshape(
                entry["shape"])
        return tensors

    def save_file(tensors, path, metadata=None):
        header, payload = {"__metadata__": metadata or {}}, b""
        for name, tensor in tensors.items():
            data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                            "data_offsets": [len(payload), len(payload) + len(data)]}
            payload += data
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + payload)


class SeedBn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def normalised(images, dtype):
    return ((images.to(dtype) / 255 - 0.1307) / 0.3081).unsqueeze(1)


def scores(net, images):
    """What the network makes of images [n, 28, 28], computed in float64."""
    net = net.double().eval()
    with torch.no_grad():
        return net(normalised(images, torch.float64))


def make(path, io_path, count=8):
    """Weights whose running statistics have moved, and what they make of some images."""
    torch.manual_seed(1)
    images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8)
    net = SeedBn()
    for _ in range(3):
        net(normalised(images, torch.float32))
    save_file(net.state_dict(), path, {"format": "pt"})
    save_file({"images": images, "scores": scores(net, images)}, io_path)


def main():
    command, *paths = sys.argv[1:]
    if command == "record":
        make(f"{paths[0]}/interop_seed_bn.safetensors", f"{paths[0]}/interop_io.safetensors")
    elif command == "exchange":
        ours, folder = paths
        make(f"{folder}/weights", f"{folder}/io")
        net = SeedBn()
        net.load_state_dict(load_file(ours), strict=True)
        save_file({"scores": scores(net, load_file(f"{folder}/io")["images"])}, f"{folder}/scores")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
