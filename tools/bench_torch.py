#!/usr/bin/env python3
"""The same training steps in PyTorch, for `lockstep bench` to stand beside: one JSON line.

The networks are those of common/nn/models.cpp. Data is a normalised tensor in memory, from which
each step picks a shuffled batch, as a careful PyTorch user would do it.
"""

import argparse
import json
import os
import resource
import sys
import time


def seed_network(nn, functional):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
            self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

        def forward(self, x):
            x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
            x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
            x = functional.relu(self.fc1(x.reshape(-1, 320)))
            return functional.log_softmax(self.fc2(x), dim=1)

    return Net(), functional.nll_loss


def resnet18(nn, functional, width):
    class Residual(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, padding=1, stride=stride)
            self.conv2 = nn.Conv2d(after, after, 3, padding=1)
            plain = before == after and stride == 1
            self.conv3 = None if plain else nn.Conv2d(before, after, 1, stride=stride)
            self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

        def forward(self, x):
            y = functional.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(y))
            return functional.relu(y + (x if self.conv3 is None else self.conv3(x)))

    layers = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for block, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
        layers += [Residual(before, after, 1 if block == 0 else 2), Residual(after, after, 1)]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers), functional.cross_entropy


def main():
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("seed", "resnet18"), default="seed")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch starts its threads
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    net, loss_function = (seed_network(nn, functional) if options.model == "seed"
                          else resnet18(nn, functional, options.width))
    images, labels = torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,))
    if options.channels_last:
        net = net.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    startup, seconds = time.perf_counter() - begin, []
    for _ in range(options.steps):
        step_begin = time.perf_counter()
        batch = torch.randint(0, len(labels), (options.batch,))
        optimizer.zero_grad()
        loss = loss_function(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - step_begin)
    json.dump({"torch": torch.__version__, "step_seconds": seconds, "startup_seconds": startup,
               "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
              sys.stdout)


if __name__ == "__main__":
    main()
