"""Texts of packages: entry points, READMEs, container and service files. `{{name}}` is replaced by a value."""

from collections.abc import Mapping


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its values.

    >>> filled("deploy {{name}} {as it is}", {"name": "judge"})
    'deploy judge {as it is}'
    """
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text


ENTRY = '''"""Entry point of this package; see README.md. Settings come from the environment."""

from rollart.app.functions import packaged

'''

_HEAD = """# Reward function `{{function}}`

Made by `rollart reward package` (rollart {{rollart}}, Python {{python}}). The folder is complete: the function, the
modules of rollart that serve it, and `requirements.txt` with exact versions.

"""

_SETTINGS = """
## Settings

| environment variable | is |
|---|---|
| `ROLLART_REWARD_SECRET` | the secret that clients send or sign with; without it every call gets status 403 |
| `ROLLART_REWARD_OPEN` | `1`: no secret is needed, because the platform authenticates clients |
| `ROLLART_REWARD_CONCURRENCY` | calls that one instance runs at a time, 8 by default; more get status 429 |

`GET /health` says whether the instance works, `GET /openapi.json` describes the interface.

## Use it in a run

```toml
[tasks.TASK]
rewards = [{ function = "{{function}}", run = "https://URL-OF-THE-DEPLOYMENT", secret = "ROLLART_REWARD_SECRET" }]
```

The variable must be set where the reward workers of the run are.
"""

FRAMEWORK_README = (
    _HEAD
    + """## Try it here

```
python -m venv ../try && ../try/bin/pip install -r requirements.txt
ROLLART_REWARD_SECRET=try ../try/bin/functions-framework --target score --port 8080
```

## Google Cloud Run

```
printf '%s' "$ROLLART_REWARD_SECRET" | gcloud secrets create rollart-reward-secret --data-file=-
gcloud run deploy {{name}} --source . --function score --base-image python{{python_short}} \\
    --no-cpu-throttling --min-instances 0 --concurrency 8 --timeout 300 --allow-unauthenticated \\
    --set-secrets ROLLART_REWARD_SECRET=rollart-reward-secret:latest
```

`--allow-unauthenticated` leaves authentication to the secret. Cloud Run limits requests to 32 MiB, functions-framework
to 10 MiB: use `batch` with that in mind.

## Knative

```
docker build -t REGISTRY/{{name}} . && docker push REGISTRY/{{name}}
kubectl create secret generic rollart-reward --from-literal=secret="$ROLLART_REWARD_SECRET"
kubectl apply -f service.yaml       # after you have put your registry into it
```
"""
    + _SETTINGS
)

FRAMEWORK_DOCKERFILE = """FROM python:{{python}}-slim
WORKDIR /function
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
USER nobody
ENV PYTHONUNBUFFERED=1 PORT=8080
CMD ["functions-framework", "--target", "score"]
"""

KNATIVE_SERVICE = """apiVersion: serving.knative.dev/v1
kind: Service
metadata:
  name: {{name}}
spec:
  template:
    metadata:
      annotations:
        autoscaling.knative.dev/min-scale: "0"
    spec:
      containerConcurrency: 8
      timeoutSeconds: 300
      containers:
        - image: REGISTRY/{{name}}
          ports: [{ containerPort: 8080 }]
          readinessProbe: { httpGet: { path: /health } }
          livenessProbe: { httpGet: { path: /health }, failureThreshold: 3 }
          env:
            - name: ROLLART_REWARD_SECRET
              valueFrom: { secretKeyRef: { name: rollart-reward, key: secret } }
"""

LAMBDA_README = (
    _HEAD
    + """## Build

```
cp -r . ../build-{{name}}
pip install -r requirements.txt --target ../build-{{name}} \\
    --platform manylinux2014_x86_64 --only-binary=:all: --python-version {{python}}
(cd ../build-{{name}} && python -m zipfile -c ../{{name}}.zip .)
```

## AWS Lambda

```
aws lambda create-function --function-name {{name}} --runtime python{{python}} \\
    --handler lambda_function.lambda_handler --zip-file fileb://../{{name}}.zip \\
    --timeout 300 --memory-size 512 --role ROLE_ARN \\
    --environment "Variables={ROLLART_REWARD_SECRET=$ROLLART_REWARD_SECRET}"
aws lambda create-function-url-config --function-name {{name}} --auth-type NONE
aws lambda add-permission --function-name {{name}} --statement-id url --principal '*' \\
    --action lambda:InvokeFunctionUrl --function-url-auth-type NONE
aws lambda add-permission --function-name {{name}} --statement-id url-invoke --principal '*' \\
    --action lambda:InvokeFunction --invoked-via-function-url
```

`--auth-type NONE` leaves authentication to the secret. The function can also be invoked directly; then IAM
authenticates, and no secret is needed:

```
aws lambda invoke --function-name {{name}} --cli-binary-format raw-in-base64-out \\
    --payload file://request.json answer.json
```

An instance gets one event at a time. Lambda limits requests and answers to 6 MB; an answer that is late by Lambda's own
timeout is given up half a second before.
"""
    + _SETTINGS
)

ASGI_README = (
    _HEAD
    + """## Any ASGI host

```
python -m venv ../try && ../try/bin/pip install -r requirements.txt
ROLLART_REWARD_SECRET=try ../try/bin/uvicorn main:app --port 8080
```

## Any container host

```
docker build -t {{name}} .
docker run -e ROLLART_REWARD_SECRET -p 8080:8080 {{name}}
```

Put a proxy with TLS before it: the secret, and what the function sees, travel as they are.
"""
    + _SETTINGS
)

ASGI_DOCKERFILE = """FROM python:{{python}}-slim
WORKDIR /function
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
USER nobody
ENV PYTHONUNBUFFERED=1
CMD ["uvicorn", "main:app", "--host", "0.0.0.0", "--port", "8080"]
"""
