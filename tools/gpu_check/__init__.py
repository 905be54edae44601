"""What `./lockstep gpu-check` does, by file:

command   its options, and the parts in order
machine   the GPU, the tools and versions that are here
bundle    --bundle: collects what an offline build needs;  --offline: verifies and unpacks it
build     configures and compiles build-gpu/
checks    the parts ops, stages and sanitizer
measure   the part bench, beside PyTorch
results   the plan, sections, counts, and the one file to hand back
"""
