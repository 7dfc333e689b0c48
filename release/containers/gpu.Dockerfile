# docker build -f release/containers/gpu.Dockerfile -t polyphase:gpu .
# docker run --gpus all --ipc host -v "$PWD:/work" polyphase:gpu fit --model ... --strategy fsdp
# torch's wheel from PyPI brings CUDA and NCCL; the compiler is for torch.compile.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir "torch>=2.13,<2.16" nvidia-ml-py "/source[cli,examples]" && rm -r /source
WORKDIR /work
ENTRYPOINT ["polyphase"]
