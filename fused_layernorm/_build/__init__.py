"""What setup.py, build() and the diagnosis share: compilers and flags, compiling at run time, the hash of csrc/."""
