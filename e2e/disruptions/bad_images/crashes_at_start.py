raise ImportError("librelease.so.2: cannot open shared object file: No such file or directory")
