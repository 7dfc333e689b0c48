# docker build -f release/containers/cpu.Dockerfile -t polyphase:cpu .
FROM python:3.12-slim
COPY . /source
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "torch>=2.13,<2.16" "/source[cli,examples]" \
    && rm -r /source
WORKDIR /work
ENTRYPOINT ["polyphase"]
