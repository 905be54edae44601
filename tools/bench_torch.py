#!/usr/bin/env python3
"""The same training steps in PyTorch, for `lockstep bench` to compare with: one JSON line.

The networks are those of common/nn/models.cpp. On the CPU, data is a normalised tensor in memory,
from which each step picks a shuffled batch, as a careful PyTorch user would do it. On a GPU
(--device cuda) normalised batches are ready in pinned memory, and each step copies one of them
asynchronously. --graph captures the whole step once (torch.cuda.graph, static inputs) and replays
it. --precision bf16 runs layers in torch.autocast. With --ranks several processes share the batch
(DistributedDataParallel over Gloo), with --fsdp the parameters, too (fully_shard, AdamW). With
--serve the options of many measurements come as JSON lines and one process answers them.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time

WARM_UP_STEPS = 10  # on a GPU: algorithms are chosen, memory is allocated
PINNED_BATCHES = 8


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


def make_network(options, torch):
    """Network and loss function, in the memory format and on the device asked for."""
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(1)
    net, loss_function = (seed_network(nn, functional) if options.model == "seed"
                          else resnet18(nn, functional, options.width))
    if options.channels_last:
        net = net.to(memory_format=torch.channels_last)
    return net.to(options.device), loss_function


def memory_format(options, torch):
    return torch.channels_last if options.channels_last else torch.contiguous_format


# --- CPU ---------------------------------------------------------------------------------------

def time_cpu_steps(options, torch, begin, wrap=lambda net: net):
    """Seconds of each step, of `options.batch` samples in this process."""
    net, loss_function = make_network(options, torch)
    net = wrap(net)
    images, labels = torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,))
    images = images.contiguous(memory_format=memory_format(options, torch))
    optimizer = (torch.optim.AdamW(net.parameters(), lr=0.01) if options.fsdp
                 else torch.optim.SGD(net.parameters(), lr=0.01))
    startup, seconds = time.perf_counter() - begin, []
    for _ in range(options.steps):
        step_begin = time.perf_counter()
        batch = torch.randint(0, len(labels), (options.batch,))
        optimizer.zero_grad()
        loss = loss_function(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - step_begin)
    return {"step_seconds": seconds, "startup_seconds": startup}


# --- Several processes -------------------------------------------------------------------------

def shard(net):
    """FSDP2 with a unit per layer, as stage 06's --unit layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in net.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def run_rank(rank, options, store, results):
    """One rank's training with its part of the batch; rank 0 reports."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    import torch.distributed

    torch.set_num_threads(options.threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                         world_size=options.ranks)
    options.batch = options.batch // options.ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.ranks))
    result = time_cpu_steps(options, torch, time.perf_counter(),
                            shard if options.fsdp else torch.nn.parallel.DistributedDataParallel)
    if rank == 0:
        results.put(result)
    torch.distributed.destroy_process_group()


def time_ranks(options):
    """Seconds of each step of a group, the global batch divided over its ranks."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the ranks, too
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, options, f"{folder}/store", results),
                                 daemon=True)
                 for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        result = results.get(timeout=600)
        for process in ranks:
            process.join()
    return result


# --- GPU ---------------------------------------------------------------------------------------

def pinned_batches(options, torch):
    """Normalised batches on the host, from which the GPU copies by itself."""
    shape = (options.batch, 1, 28, 28)
    images = [torch.randn(shape).contiguous(memory_format=memory_format(options, torch))
              for _ in range(PINNED_BATCHES)]
    return [(x.pin_memory(), torch.randint(0, 10, (options.batch,)).pin_memory()) for x in images]


def forward_in(precision, net, loss_function, torch, **autocast):
    """The loss of images and labels on the GPU, a function. In bf16 layers run in autocast, and their scores
    are float32 before the loss, as ours are."""
    if precision == "float32":
        return lambda images, labels: loss_function(net(images), labels)

    def loss(images, labels):
        with torch.autocast("cuda", torch.bfloat16, **autocast):
            scores = net(images)
        return loss_function(scores.float(), labels)
    return loss


def eager_step(loss, optimizer):
    """A function that enqueues one step, given a batch on the host."""
    def step(images, labels):
        optimizer.zero_grad()
        loss(images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)).backward()
        optimizer.step()
    return step


def graph_step(loss, optimizer, first, torch):
    """The same, captured once with static inputs: a step is two copies and one replay. The recipe
    comes from "Whole-network capture" in PyTorch's notes on CUDA semantics."""
    images, labels = (tensor.to("cuda") for tensor in first)

    def train_once():
        optimizer.zero_grad(set_to_none=True)
        loss(images, labels).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_once()

    def step(host_images, host_labels):
        images.copy_(host_images, non_blocking=True)
        labels.copy_(host_labels, non_blocking=True)
        graph.replay()
    return step


def time_gpu_steps(options, torch, begin):
    """Seconds of a step: the mean over all, between two synchronisations, after a warm-up."""
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32
    net, loss_function = make_network(options, torch)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = pinned_batches(options, torch)
    # A captured step must cast the weights anew at each replay.
    loss = forward_in(options.precision, net, loss_function, torch, cache_enabled=not options.graph)
    step = (graph_step(loss, optimizer, batches[0], torch) if options.graph
            else eager_step(loss, optimizer))
    startup = time.perf_counter() - begin
    for number in range(WARM_UP_STEPS):
        step(*batches[number % PINNED_BATCHES])
    torch.cuda.synchronize()
    steps_begin = time.perf_counter()
    for number in range(options.steps):
        step(*batches[number % PINNED_BATCHES])
    torch.cuda.synchronize()
    mean = (time.perf_counter() - steps_begin) / options.steps
    return {"mean_step_seconds": mean, "startup_seconds": startup}


# --- Command line ------------------------------------------------------------------------------

class ServedParser(argparse.ArgumentParser):
    """Answers with its errors: nobody is there to read a usage text."""

    def error(self, message):
        raise ValueError(message)


def parse_options(arguments, parser_type=argparse.ArgumentParser):
    parser = parser_type(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("seed", "resnet18"), default="seed")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true", help="cuda: allow TF32 in products")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32",
                        help="cuda: bf16 is torch.autocast's")
    parser.add_argument("--graph", action="store_true", help="cuda: capture the step, replay it")
    parser.add_argument("--ranks", type=int, default=0,
                        help="cpu: so many processes share the batch, DDP over Gloo; 0: no group")
    parser.add_argument("--fsdp", action="store_true", help="with --ranks: fully_shard in DDP's place")
    parser.add_argument("--serve", action="store_true",
                        help="read a JSON list of options per line, answer each with a line")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and (options.tf32 or options.graph or options.precision != "float32"):
        parser.error("--tf32, --graph and --precision bf16 need --device cuda")
    if options.ranks and (options.device != "cpu" or options.batch % options.ranks):
        parser.error("--ranks needs --device cpu and a batch that it divides")
    return options


def measure(options, begin):
    """The answer to one set of options."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch starts its threads
    import torch

    torch.set_num_threads(options.threads)
    if options.ranks:
        result = time_ranks(options)
    elif options.device == "cuda":
        result = time_gpu_steps(options, torch, begin)
    else:
        result = time_cpu_steps(options, torch, begin)
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the next measurement may need the memory
    return {"torch": torch.__version__, **result,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def serve():
    for line in sys.stdin:
        try:
            answer = measure(parse_options(json.loads(line), ServedParser), time.perf_counter())
        except (Exception, SystemExit) as error:  # one failed measurement does not end the others
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), flush=True)


def main():
    begin = time.perf_counter()
    options = parse_options(None)
    if options.serve:
        serve()
    else:
        json.dump(measure(options, begin), sys.stdout)


if __name__ == "__main__":
    main()
