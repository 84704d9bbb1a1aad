//! The OpenAPI document that describes the control socket. The schemas of answers and bodies are derived from their
//! types.

use larder_block::ByteLen;
use larder_block::filter::throttle::RateLimit;
use larder_prefetch::PrefetchOptions;
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::events::Event;
use super::memory::{DetachResult, MemoryPatch, MemoryState};
use super::migration::{CancelResult, DOWNTIME_MS_MAX, MigrationPatch, MigrationState};
use super::requests::{CacheReplacement, DiskPatch, HotRanges, MoveRequest, ReloadResult};
use super::state::{DiskList, DiskState, ErrorBody, ServerState};
use super::trace::Traces;
use super::{
    CANCEL_DETACH_PATH, CANCEL_MIGRATION_PATH, DETACH_PATH, DISKS_PATH, EVENTS_PATH, MEMORY_PATH, MIGRATION_PATH,
    MOVE_PATH, OPENAPI_PATH, RELOAD_PATH, SERVER_PATH, TRACE_PATH,
};
use crate::image::{CACHE_ENDURANCE_MAX, CACHE_ENDURANCE_MIN, CACHE_MODES, cache_mode_name};
use crate::limits::LimitName;
use crate::vm::MoveStepResult;

/// Returns the document.
pub(super) fn document() -> Value {
    let mut types = Schemas::default();
    let server = types.reference::<ServerState>();
    let disks = types.reference::<DiskList>();
    let traces = types.reference::<Traces>();
    let disk = types.reference::<DiskState>();
    let patch = types.reference::<DiskPatch>();
    let replacement = types.reference::<CacheReplacement>();
    let reloaded = types.reference::<ReloadResult>();
    let move_request = types.reference::<MoveRequest>();
    let moved = types.reference::<MoveStepResult>();
    let hot = types.reference::<HotRanges>();
    let memory = types.reference::<MemoryState>();
    let memory_patch = types.reference::<MemoryPatch>();
    let detached = types.reference::<DetachResult>();
    let migration = types.reference::<MigrationState>();
    let migration_patch = types.reference::<MigrationPatch>();
    let cancelling = types.reference::<CancelResult>();
    types.reference::<Event>();
    let failure = types.reference::<ErrorBody>();
    types.add_request_bounds();

    let error_content = |status: &str, why: &str| (status.to_owned(), json_content(why, &failure));
    let bad_request = || error_content("400", "The request is not valid HTTP/1.1.");
    let disk_unavailable = || {
        error_content("503", "The disk is being closed, or its thread does not answer, because its storage is stuck.")
    };
    let bad_body = || error_content("400", "The body does not match its schema, or its values are invalid.");
    let no_such_disk = || error_content("404", "There is no such disk.");
    let disk_content = |what: &str| ("200".to_owned(), json_content(what, &disk));
    let accepted = || {
        let what = "The change takes longer than 2 s, and continues; `flush` of the disk's cache shows when it has ended, and its result.";
        ("202".to_owned(), json_content(what, &disk))
    };
    let no_memory = || error_content("404", "This process manages no memory.");
    let memory_content = || ("200".to_owned(), json_content("The memory.", &memory));
    let memory_unavailable = || {
        error_content(
            "503",
            "Larder has detached from the memory, or its process has ended, or its thread does not answer.",
        )
    };
    let no_migration = || error_content("404", "This process migrates no virtual machine.");
    let migration_content = || ("200".to_owned(), json_content("The migration.", &migration));
    let conflict = || error_content("409", "The request cannot be carried out; `error` gives the reason.");
    let disk_parameters = json!([{
        "name": "disk",
        "in": "path",
        "required": true,
        "description": "The disk's name, or its index in the list of disks, counted from 0.",
        "schema": {"type": "string"},
    }]);

    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Larder",
            "description": "The control socket of a process that serves the disks of a virtual machine, manages its memory, or moves it: HTTP/1.1 over a unix socket, one request for each connection.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "version": env!("CARGO_PKG_VERSION"),
        },
        "servers": [{"url": "http://localhost"}],
        "paths": {
            SERVER_PATH: {"get": {
                "operationId": "query-server",
                "summary": "Properties of the process.",
                "responses": responses([("200".to_owned(), json_content("The process.", &server)), bad_request()]),
            }},
            OPENAPI_PATH: {"get": {
                "operationId": "query-openapi",
                "summary": "This document.",
                "responses": responses([
                    ("200".to_owned(), json_content("The document.", &json!({"type": "object"}))),
                    bad_request(),
                ]),
            }},
            EVENTS_PATH: {"get": {
                "operationId": "events",
                "summary": "A stream of events (server-sent events).",
                "description": "First the buffered events, at most the last 256, then each new event as it occurs, without an end; the data of each is an Event. A client that reconnects sends the id of the last event that it received in Last-Event-ID.",
                "parameters": [{
                    "name": "Last-Event-ID",
                    "in": "header",
                    "description": "Only events after this one are sent.",
                    "schema": {"type": "string"},
                }],
                "responses": responses([
                    ("200".to_owned(), json!({
                        "description": "The events.",
                        "content": {"text/event-stream": {"schema": {"type": "string"}}},
                    })),
                    bad_request(),
                    error_content("503", "Too many event subscribers."),
                ]),
            }},
            TRACE_PATH: {"get": {
                "operationId": "query-trace",
                "summary": "The last events of each disk.",
                "description": "Changes of the disk's state, and messages that its server has logged about it: at most the last 1024, the oldest first. The server answers even while a disk's thread hangs.",
                "responses": responses([("200".to_owned(), json_content("The events.", &traces)), bad_request()]),
            }},
            RELOAD_PATH: {"post": {
                "operationId": "reload",
                "summary": "Reload the VM's file, and apply the changes that are possible while the VM runs.",
                "responses": responses([
                    ("200".to_owned(), json_content("The file was reloaded; the answer gives the result of each change.", &reloaded)),
                    ("202".to_owned(), json_content("The reload takes longer than 8 s, and continues.", &reloaded)),
                    error_content("400", "The request is not valid HTTP/1.1, or it has a body."),
                    error_content("409", "There is no file to reload, or it is invalid; nothing has changed."),
                    error_content("503", "The server is being stopped."),
                ]),
            }},
            MOVE_PATH: {"post": {
                "operationId": "move",
                "summary": "Perform a step of the move of the VM's disks to or from another host, for the processes that move the VM.",
                "requestBody": request_body(&move_request),
                "responses": responses([
                    ("200".to_owned(), json_content("The step is complete.", &moved)),
                    ("202".to_owned(), json_content("The step takes longer than 8 s, and continues, or the server is ending: repeat the request.", &moved)),
                    bad_body(),
                    error_content("409", "The step cannot be performed; `error` gives the reason. Nothing has changed."),
                ]),
            }},
            MIGRATION_PATH: {
                "get": {
                    "operationId": "query-migration",
                    "summary": "State of the migration that the process performs.",
                    "responses": responses([migration_content(), bad_request(), no_migration()]),
                },
                "patch": {
                    "operationId": "limit-migration",
                    "summary": "Change the limits of the migration, effective at once.",
                    "requestBody": request_body(&migration_patch),
                    "responses": responses([migration_content(), bad_body(), no_migration(), conflict()]),
                },
            },
            CANCEL_MIGRATION_PATH: {"post": {
                "operationId": "cancel-migration",
                "summary": "Cancel the migration, like SIGINT: the virtual machine stays on its host, as long as that is possible.",
                "responses": responses([
                    ("202".to_owned(), json_content("The request was forwarded; `phase` shows its result.", &cancelling)),
                    bad_request(),
                    no_migration(),
                ]),
            }},
            MEMORY_PATH: {
                "get": {
                    "operationId": "query-memory",
                    "summary": "The memory that the process manages.",
                    "responses": responses([memory_content(), bad_request(), no_memory(), memory_unavailable()]),
                },
                "patch": {
                    "operationId": "limit-memory",
                    "summary": "Change the limits of the memory.",
                    "requestBody": request_body(&memory_patch),
                    "responses": responses([memory_content(), bad_body(), no_memory(), conflict(), memory_unavailable()]),
                },
            },
            DETACH_PATH: {"post": {
                "operationId": "detach-memory",
                "summary": "Page in all pages, and detach from the process.",
                "responses": responses([
                    ("200".to_owned(), json_content("Larder has detached.", &detached)),
                    ("202".to_owned(), json_content("The detach takes longer than 2 s, and continues. If it is stopped, `detaching` becomes false, and `detach_problem` gives the reason.", &detached)),
                    bad_request(), no_memory(), conflict(), memory_unavailable(),
                ]),
            }},
            CANCEL_DETACH_PATH: {"post": {
                "operationId": "cancel-detach-memory",
                "summary": "Cancel a running detach; the memory remains managed, within its budget.",
                "responses": responses([
                    ("202".to_owned(), json_content("The detach is being cancelled; `detaching` becomes false.", &cancelling)),
                    bad_request(), no_memory(), conflict(), memory_unavailable(),
                ]),
            }},
            DISKS_PATH: {"get": {
                "operationId": "query-disks",
                "summary": "All disks.",
                "responses": responses([("200".to_owned(), json_content("The disks.", &disks)), bad_request(), disk_unavailable()]),
            }},
            format!("{DISKS_PATH}/{{disk}}"): {
                "parameters": disk_parameters,
                "get": {
                    "operationId": "query-disk",
                    "summary": "A disk.",
                    "responses": responses([disk_content("The disk."), bad_request(), no_such_disk(), disk_unavailable()]),
                },
                "patch": {
                    "operationId": "set-disk",
                    "summary": "Change the settings of a disk.",
                    "requestBody": request_body(&patch),
                    "responses": responses([disk_content("The settings have been applied."), accepted(), bad_body(), no_such_disk(), conflict(), disk_unavailable()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/hot"): {
                "parameters": disk_parameters,
                "get": {
                    "operationId": "query-hot",
                    "summary": "The hot ranges of a disk, as recorded by its cache.",
                    "responses": responses([
                        ("200".to_owned(), json_content("The hot ranges; empty if the disk has no cache.", &hot)),
                        bad_request(), no_such_disk(), disk_unavailable(),
                    ]),
                },
                "post": {
                    "operationId": "warm-disk",
                    "summary": "Fill a disk's cache with the ranges that were hot on another host, while the disk's guest is idle.",
                    "requestBody": request_body(&hot),
                    "responses": responses([disk_content("The cache is being filled, if there is one with free space."), accepted(), bad_body(), no_such_disk(), conflict(), disk_unavailable()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/flush"): {
                "parameters": disk_parameters,
                "post": {
                    "operationId": "flush-cache",
                    "summary": "Write the dirty data of a disk's cache to the disk.",
                    "responses": responses([disk_content("All dirty data has been written."), accepted(), bad_request(), no_such_disk(), conflict(), disk_unavailable()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/replace"): {
                "parameters": disk_parameters,
                "post": {
                    "operationId": "replace-cache",
                    "summary": "Replace a disk's cache, or reopen its failed cache.",
                    "requestBody": request_body(&replacement),
                    "responses": responses([disk_content("The disk uses the new cache."), accepted(), bad_body(), no_such_disk(), conflict(), disk_unavailable()]),
                },
            },
        },
        "components": {"schemas": types.0},
    });
    with_forbidden(document, &json_content("The client may only read.", &failure))
}

/// Adds the refusal of clients that may only read to each operation that changes something.
fn with_forbidden(mut document: Value, refused: &Value) -> Value {
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (_, operations) in paths {
        for method in ["post", "patch"] {
            if let Some(operation) = operations.get_mut(method) {
                operation["responses"]["403"] = refused.clone();
            }
        }
    }
    document
}

fn json_content(what: &str, schema: &Value) -> Value {
    json!({"description": what, "content": {"application/json": {"schema": schema}}})
}

fn request_body(schema: &Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

fn responses<const N: usize>(all: [(String, Value); N]) -> Map<String, Value> {
    all.into_iter().collect()
}

/// Referenced types, by name.
#[derive(Default)]
struct Schemas(Map<String, Value>);

impl Schemas {
    /// Returns a reference to a type, and adds the schemas of the type and of its parts.
    fn reference<T: ToSchema + PartialSchema>(&mut self) -> Value {
        let mut parts = Vec::new();
        T::schemas(&mut parts);
        parts.push((T::name().into_owned(), T::schema()));
        for (name, schema) in parts {
            self.0.insert(name, json!(schema as RefOr<Schema>));
        }
        json!({"$ref": format!("#/components/schemas/{}", T::name())})
    }

    /// Adds bounds of request fields that are not part of their Rust types.
    fn add_request_bounds(&mut self) {
        let size = |min: ByteLen, max: ByteLen| json!({"type": "integer", "minimum": min.get(), "maximum": max.get()});
        let zero_or = |size: Value| json!([{"type": "integer", "const": 0}, size, {"type": "null"}]);
        let len = json!([size(PrefetchOptions::LEN_MIN, PrefetchOptions::MEMORY_MAX), {"type": "null"}]);
        let memory = size(PrefetchOptions::MEMORY_MIN, PrefetchOptions::MEMORY_MAX);
        self.set_any_of("PrefetchPatch", "memory", zero_or(memory));
        self.set_any_of("PrefetchPatch", "ahead", len.clone());
        self.set_any_of("PrefetchPatch", "largest_read", len);
        self.set_any_of("CachePatch", "endurance", zero_or(size(CACHE_ENDURANCE_MIN, CACHE_ENDURANCE_MAX)));
        let downtime = json!([{"type": "integer", "minimum": 1, "maximum": DOWNTIME_MS_MAX}, {"type": "null"}]);
        self.set_any_of("MigrationPatch", "downtime_ms", downtime);
        let processors = json!([
            {"type": "number", "const": 0},
            {"type": "number", "minimum": 0.01, "maximum": 1024},
            {"type": "null"},
        ]);
        self.set_any_of("MigrationPatch", "processors", processors);
        let modes: Vec<&str> = CACHE_MODES.into_iter().map(cache_mode_name).collect();
        self.set_any_of("CachePatch", "mode", json!([{"type": "string", "enum": modes}, {"type": "null"}]));
        let address = json!({"type": "string", "pattern": "^(/|nbds?://|nbds?\\+unix://)."});
        self.set_any_of("CacheReplacement", "with", json!([address, {"type": "null"}]));
        let limit = |name: &str| {
            let max = if name.ends_with("-length") { u32::MAX.into() } else { RateLimit::MAX };
            json!({"type": "integer", "minimum": 0, "maximum": max})
        };
        let limits: Map<String, Value> = LimitName::all().map(|row| (row.name.to_owned(), limit(row.name))).collect();
        if let Some(Value::Object(schema)) = self.0.get_mut("LimitsState") {
            schema.insert("properties".to_owned(), Value::Object(limits));
            schema.insert("additionalProperties".to_owned(), json!(false));
            schema.remove("propertyNames");
        }
    }

    /// Replaces the schema of a property by a choice of schemas.
    fn set_any_of(&mut self, name: &str, property: &str, any_of: Value) {
        let described = self.0[name]["properties"][property]["description"].clone();
        self.0[name]["properties"][property] = json!({"description": described, "anyOf": any_of});
    }
}
