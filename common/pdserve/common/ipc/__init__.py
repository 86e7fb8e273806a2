"""Between two processes of this machine: frames on a socket, calls with answers, and the life of a child process."""
