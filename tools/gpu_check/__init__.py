"""What `./lockstep gpu-check` does; tools/README.md says which file does what."""
