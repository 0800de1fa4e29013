"""How torch is patched for the length of a run, and put back; `capture/torch_hooks.py` lists what is measured."""
