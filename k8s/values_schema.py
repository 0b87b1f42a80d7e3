"""Writes chart/values.schema.json: what the chart's values may say, checked by helm before it renders.

    python k8s/values_schema.py

What ends in Serve's config has the models of deployments/config.py and Ray's as its schema, so that helm
refuses what `python -m deployments.check` would.
"""

import json
import typing
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from ray.serve.schema import HTTPOptionsSchema

from deployments.config import CoordinatorThresholds, DrafterArgs, TargetArgs, WorkerThresholds

PATH: Final = Path(__file__).with_name("chart") / "values.schema.json"

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
SECONDS: Final[Schema] = {"type": "integer", "minimum": 1}
STRINGS: Final[Schema] = {"type": "object", "additionalProperties": STRING}
# Kubernetes' own objects, which are passed on as they are.
OBJECT: Final[Schema] = {"type": "object"}
OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
KEY: Final = "^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$"
"""Short names of models and pools: they become parts of the names of applications and pods."""

DRAFTERS: Final[dict[str, type[BaseModel]]] = {
    typing.get_args(args.model_fields["kind"].annotation)[0]: args
    for args in typing.get_args(typing.get_args(DrafterArgs)[0])
}


def closed(properties: Schema, *required: str) -> Schema:
    """An object that has no other properties."""
    schema: Schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return schema | ({"required": list(required)} if required else {})


def of_model(model: type[BaseModel], *without: str) -> Schema:
    """The schema of a model of Serve's config, without what the chart itself says there."""
    schema = model.model_json_schema()
    properties = {
        name: {key: value for key, value in field.items() if key not in ("title", "default")}
        for name, field in schema["properties"].items()
        if name not in without
    }
    return closed(properties, *(name for name in schema.get("required", ()) if name not in without))


def make() -> Schema:
    """The whole schema."""
    image = closed({"repository": STRING, "tag": STRING, "pullPolicy": STRING})
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    resources = closed({"requests": amounts, "limits": amounts})
    pod = {
        "image": image,
        "annotations": STRINGS,
        "labels": STRINGS,
        "containerEnv": OBJECTS,
        "resources": resources,
        "nodeSelector": STRINGS,
        "tolerations": OBJECTS,
        "affinity": OBJECT,
        "topologySpreadConstraints": OBJECTS,
        "priorityClassName": STRING,
        "restartPolicy": {"enum": ["", "Always", "OnFailure", "Never"]},
    }
    count = {"type": "integer", "minimum": 1}
    group = {
        **pod,
        "replicas": closed({"min": count, "max": count}, "min", "max"),
        "numCpus": {"type": "number", "exclusiveMinimum": 0},
        "targetOngoingRequests": {"type": "number", "exclusiveMinimum": 0},
    }
    drafters = {"type": "array", "items": {"$ref": "#/definitions/drafter"}}
    of_redis = closed({"value": STRING, "valueFrom": OBJECT})
    properties: Schema = {
        "global": OBJECT,
        "nameOverride": STRING,
        "fullnameOverride": STRING,
        "image": image,
        "imagePullSecrets": OBJECTS,
        "annotations": STRINGS,
        "commonLabels": STRINGS,
        "common": closed({"containerEnv": OBJECTS}),
        "initializingTimeout": STRING,
        "upgradeStrategy": closed({"type": {"enum": ["NewCluster", "None"]}}),
        "rayClusterDeletionDelaySeconds": SECONDS,
        "gracefulShutdownTimeoutSeconds": SECONDS,
        "models": {
            "type": "object",
            "propertyNames": {"pattern": KEY},
            "additionalProperties": closed(
                {
                    "modelId": {"type": "string", "minLength": 1},
                    "target": closed(
                        {
                            **group,
                            "args": of_model(TargetArgs, "device", "tensor_parallel_size"),
                            "gpus": {"type": "integer", "minimum": 0, "maximum": 64},
                        },
                        "args",
                        "resources",
                    ),
                    "drafters": drafters,
                    "thresholds": of_model(WorkerThresholds),
                    "drafts": {"type": "array", "items": STRING, "uniqueItems": True},
                },
                "target",
            ),
        },
        "drafts": {
            "type": "object",
            "propertyNames": {"pattern": KEY},
            "additionalProperties": closed(
                {
                    **group,
                    "target": STRING,
                    "drafters": drafters | {"minItems": 1},
                    "maxSessions": count,
                    "thresholds": of_model(WorkerThresholds),
                    "gpus": {"type": "integer", "minimum": 0, "maximum": 1},
                },
                "target",
                "drafters",
                "resources",
            ),
        },
        "coordinators": closed(
            {
                **group,
                "placement": {"enum": ["targets", "own"]},
                "thresholds": of_model(CoordinatorThresholds, "api_keys_file"),
            },
        ),
        "head": closed({**pod, "rayStartParams": STRINGS}),
        "autoscalerOptions": closed(
            {
                "idleTimeoutSeconds": SECONDS,
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "resources": resources,
            },
        ),
        "gcsFaultTolerance": closed(
            {
                "enabled": BOOLEAN,
                "redisAddress": STRING,
                "redisUsername": of_redis,
                "redisPassword": of_redis,
            },
        ),
        "auth": closed({"mode": {"enum": ["token", "disabled"]}, "secretName": STRING}),
        "dataPlane": closed({"tokenSecret": STRING, "tlsSecret": STRING, "tlsName": STRING}),
        "apiKeys": closed({"secretName": STRING, "key": {"type": "string", "minLength": 1}}),
        "serve": closed({"httpOptions": of_model(HTTPOptionsSchema, "host", "port")}),
        "service": closed(
            {
                "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                "headless": BOOLEAN,
                "annotations": STRINGS,
            },
        ),
        "modelStore": closed(
            {
                "cache": closed({"existingClaim": STRING, "sizeLimit": STRING}),
                "volume": closed(
                    {"existingClaim": STRING, "mountPath": {"type": "string", "pattern": "^/"}}
                ),
                "hubTokenSecret": STRING,
            },
        ),
        "podSecurityContext": OBJECT,
        "securityContext": OBJECT,
        "probes": closed({"timeoutSeconds": SECONDS}),
        "networkPolicy": closed(
            {"enabled": BOOLEAN, "clients": OBJECTS, "scrapers": OBJECTS, "operator": OBJECTS}
        ),
        "podDisruptionBudget": closed({"enabled": BOOLEAN}),
        "podMonitor": closed({"enabled": BOOLEAN, "interval": STRING, "labels": STRINGS}),
        "prometheusRule": closed({"enabled": BOOLEAN, "labels": STRINGS}),
        "dashboards": closed({"enabled": BOOLEAN, "labels": STRINGS}),
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **closed(properties),
        "definitions": {"drafter": _drafter()},
    }


def _drafter() -> Schema:
    """A drafter of any kind. Chosen by its kind, so that an error speaks of that kind alone."""
    kinds = [
        {
            "if": {"required": ["kind"], "properties": {"kind": {"const": kind}}},
            "then": of_model(model, "placement", "device"),
        }
        for kind, model in DRAFTERS.items()
    ]
    return {
        "type": "object",
        "required": ["name", "kind"],
        "properties": {"kind": {"enum": list(DRAFTERS)}},
        "allOf": kinds,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(make(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
