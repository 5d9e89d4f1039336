# The demo on an NVIDIA GPU, with all that its kernels are compiled with:
#   docker build -t headstart .
#   docker run --rm --gpus all -v "$PWD/runs:/headstart/runs" headstart
# torch from PyPI brings CUDA's libraries; the driver is the host's, through the NVIDIA container toolkit.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /headstart
COPY . .
RUN make setup
ENV PATH="/headstart/.venv/bin:$PATH"
CMD ["make", "demo"]
