//! The OpenAPI document that describes the control socket. The schemas of answers and bodies are derived from their
//! types.

use larder_block::ByteLen;
use larder_block::filter::throttle::RateLimit;
use larder_prefetch::PrefetchOptions;
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::events::Event;
use super::memory::{Detached, MemoryPatch, MemoryState};
use super::migration::{Cancelling, DOWNTIME_MS_MAX, MigrationPatch, MigrationState};
use super::state::{DiskState, Disks, Failure, ServerState};
use super::wishes::{CacheReplacement, DiskPatch, HotRanges, MoveWish, Reloaded};
use super::{
    CANCEL_DETACH_PATH, CANCEL_PATH, DETACH_PATH, DISKS_PATH, EVENTS_PATH, MEMORY_PATH, MIGRATION_PATH, MOVE_PATH,
    OPENAPI_PATH, RELOAD_PATH, SERVER_PATH,
};
use crate::image::{CACHE_ENDURANCE_MAX, CACHE_ENDURANCE_MIN, CACHE_MODES, cache_mode_name};
use crate::limits::LimitName;
use crate::vm::Moved;

/// Returns the document.
pub(super) fn document() -> Value {
    let mut types = Types::default();
    let server = types.of::<ServerState>();
    let disks = types.of::<Disks>();
    let disk = types.of::<DiskState>();
    let patch = types.of::<DiskPatch>();
    let replacement = types.of::<CacheReplacement>();
    let reloaded = types.of::<Reloaded>();
    let move_wish = types.of::<MoveWish>();
    let moved = types.of::<Moved>();
    let hot = types.of::<HotRanges>();
    let memory = types.of::<MemoryState>();
    let memory_patch = types.of::<MemoryPatch>();
    let detached = types.of::<Detached>();
    let migration = types.of::<MigrationState>();
    let migration_patch = types.of::<MigrationPatch>();
    let cancelling = types.of::<Cancelling>();
    types.of::<Event>();
    let failure = types.of::<Failure>();
    types.bound_wishes();

    let fails = |status: &str, why: &str| (status.to_owned(), described(why, &failure));
    let no_http = || fails("400", "The request is not valid HTTP/1.1.");
    let stuck = || {
        fails(
            "503",
            "The disk is being closed, or its thread does not answer, because its storage is stuck.",
        )
    };
    let bad_body = || fails("400", "The body does not match its schema, or its values are invalid.");
    let unknown = || fails("404", "There is no such disk.");
    let done = |what: &str| ("200".to_owned(), described(what, &disk));
    let goes_on = || {
        let what = "The change takes longer than 2 s, and continues; `flush` of the disk's cache shows when it has ended, and its result.";
        ("202".to_owned(), described(what, &disk))
    };
    let no_memory = || fails("404", "This process manages no memory.");
    let memory_is = || ("200".to_owned(), described("The memory.", &memory));
    let memory_over = || {
        fails(
            "503",
            "Larder has detached from the memory, or its process has ended, or its thread does not answer.",
        )
    };
    let no_migration = || fails("404", "This process migrates no virtual machine.");
    let migration_is = || ("200".to_owned(), described("The migration.", &migration));
    let refused = || fails("409", "The request cannot be carried out; `error` gives the reason.");
    let of_disk = json!([{
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
                "responses": responses([("200".to_owned(), described("The process.", &server)), no_http()]),
            }},
            OPENAPI_PATH: {"get": {
                "operationId": "query-openapi",
                "summary": "This document.",
                "responses": responses([
                    ("200".to_owned(), described("The document.", &json!({"type": "object"}))),
                    no_http(),
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
                    no_http(),
                    fails("503", "Too many event subscribers."),
                ]),
            }},
            RELOAD_PATH: {"post": {
                "operationId": "reload",
                "summary": "Reload the VM's file, and apply the changes that are possible while the VM runs.",
                "responses": responses([
                    ("200".to_owned(), described("The file was reloaded; the answer gives the result of each change.", &reloaded)),
                    ("202".to_owned(), described("The reload takes longer than 8 s, and continues.", &reloaded)),
                    fails("400", "The request is not valid HTTP/1.1, or it has a body."),
                    fails("409", "There is no file to reload, or it is invalid; nothing has changed."),
                    fails("503", "The server is being stopped."),
                ]),
            }},
            MOVE_PATH: {"post": {
                "operationId": "move",
                "summary": "Perform a step of the move of the VM's disks to or from another host, for the processes that move the VM.",
                "requestBody": body(&move_wish),
                "responses": responses([
                    ("200".to_owned(), described("The step is complete.", &moved)),
                    ("202".to_owned(), described("The step takes longer than 8 s, and continues, or the server is ending: repeat the request.", &moved)),
                    bad_body(),
                    fails("409", "The step cannot be performed; `error` gives the reason. Nothing has changed."),
                ]),
            }},
            MIGRATION_PATH: {
                "get": {
                    "operationId": "query-migration",
                    "summary": "State of the migration that the process performs.",
                    "responses": responses([migration_is(), no_http(), no_migration()]),
                },
                "patch": {
                    "operationId": "limit-migration",
                    "summary": "Change the limits of the migration, effective at once.",
                    "requestBody": body(&migration_patch),
                    "responses": responses([migration_is(), bad_body(), no_migration(), refused()]),
                },
            },
            CANCEL_PATH: {"post": {
                "operationId": "cancel-migration",
                "summary": "Cancel the migration, like SIGINT: the virtual machine stays on its host, as long as that is possible.",
                "responses": responses([
                    ("202".to_owned(), described("The request was forwarded; `phase` shows its result.", &cancelling)),
                    no_http(),
                    no_migration(),
                ]),
            }},
            MEMORY_PATH: {
                "get": {
                    "operationId": "query-memory",
                    "summary": "The memory that the process manages.",
                    "responses": responses([memory_is(), no_http(), no_memory(), memory_over()]),
                },
                "patch": {
                    "operationId": "limit-memory",
                    "summary": "Change the limits of the memory.",
                    "requestBody": body(&memory_patch),
                    "responses": responses([memory_is(), bad_body(), no_memory(), refused(), memory_over()]),
                },
            },
            DETACH_PATH: {"post": {
                "operationId": "detach-memory",
                "summary": "Page in all pages, and detach from the process.",
                "responses": responses([
                    ("200".to_owned(), described("Larder has detached.", &detached)),
                    ("202".to_owned(), described("The detach takes longer than 2 s, and continues. If it is stopped, `detaching` becomes false, and `detach_problem` gives the reason.", &detached)),
                    no_http(), no_memory(), refused(), memory_over(),
                ]),
            }},
            CANCEL_DETACH_PATH: {"post": {
                "operationId": "cancel-detach-memory",
                "summary": "Cancel a running detach; the memory remains managed, within its budget.",
                "responses": responses([
                    ("202".to_owned(), described("The detach is being cancelled; `detaching` becomes false.", &cancelling)),
                    no_http(), no_memory(), refused(), memory_over(),
                ]),
            }},
            DISKS_PATH: {"get": {
                "operationId": "query-disks",
                "summary": "All disks.",
                "responses": responses([("200".to_owned(), described("The disks.", &disks)), no_http(), stuck()]),
            }},
            format!("{DISKS_PATH}/{{disk}}"): {
                "parameters": of_disk,
                "get": {
                    "operationId": "query-disk",
                    "summary": "A disk.",
                    "responses": responses([done("The disk."), no_http(), unknown(), stuck()]),
                },
                "patch": {
                    "operationId": "set-disk",
                    "summary": "Change the settings of a disk.",
                    "requestBody": body(&patch),
                    "responses": responses([done("The settings have been applied."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/hot"): {
                "parameters": of_disk,
                "get": {
                    "operationId": "query-hot",
                    "summary": "The hot ranges of a disk, as recorded by its cache.",
                    "responses": responses([
                        ("200".to_owned(), described("The hot ranges; empty if the disk has no cache.", &hot)),
                        no_http(), unknown(), stuck(),
                    ]),
                },
                "post": {
                    "operationId": "warm-disk",
                    "summary": "Fill a disk's cache with the ranges that were hot on another host, while the disk's guest is idle.",
                    "requestBody": body(&hot),
                    "responses": responses([done("The cache is being filled, if there is one with free space."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/flush"): {
                "parameters": of_disk,
                "post": {
                    "operationId": "flush-cache",
                    "summary": "Write the dirty data of a disk's cache to the disk.",
                    "responses": responses([done("All dirty data has been written."), goes_on(), no_http(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/replace"): {
                "parameters": of_disk,
                "post": {
                    "operationId": "replace-cache",
                    "summary": "Replace a disk's cache, or reopen its failed cache.",
                    "requestBody": body(&replacement),
                    "responses": responses([done("The disk uses the new cache."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
                },
            },
        },
        "components": {"schemas": types.0},
    });
    with_readers(document, &described("The client may only read.", &failure))
}

/// Adds the refusal of clients that may only read to each operation that changes something.
fn with_readers(mut document: Value, refused: &Value) -> Value {
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

fn described(what: &str, schema: &Value) -> Value {
    json!({"description": what, "content": {"application/json": {"schema": schema}}})
}

fn body(schema: &Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

fn responses<const N: usize>(all: [(String, Value); N]) -> Map<String, Value> {
    all.into_iter().collect()
}

/// Referenced types, by name.
#[derive(Default)]
struct Types(Map<String, Value>);

impl Types {
    /// Returns a reference to a type, and adds the schemas of the type and of its parts.
    fn of<T: ToSchema + PartialSchema>(&mut self) -> Value {
        let mut parts = Vec::new();
        T::schemas(&mut parts);
        parts.push((T::name().into_owned(), T::schema()));
        for (name, schema) in parts {
            self.0.insert(name, json!(schema as RefOr<Schema>));
        }
        json!({"$ref": format!("#/components/schemas/{}", T::name())})
    }

    /// Adds bounds of request fields that are not part of their Rust types.
    fn bound_wishes(&mut self) {
        let size = |min: ByteLen, max: ByteLen| json!({"type": "integer", "minimum": min.get(), "maximum": max.get()});
        let none_or = |size: Value| json!([{"type": "integer", "const": 0}, size, {"type": "null"}]);
        let len = json!([size(PrefetchOptions::LEN_MIN, PrefetchOptions::MEMORY_MAX), {"type": "null"}]);
        let memory = size(PrefetchOptions::MEMORY_MIN, PrefetchOptions::MEMORY_MAX);
        self.bound("PrefetchPatch", "memory", none_or(memory));
        self.bound("PrefetchPatch", "ahead", len.clone());
        self.bound("PrefetchPatch", "largest_read", len);
        self.bound(
            "CachePatch",
            "endurance",
            none_or(size(CACHE_ENDURANCE_MIN, CACHE_ENDURANCE_MAX)),
        );
        let downtime = json!([{"type": "integer", "minimum": 1, "maximum": DOWNTIME_MS_MAX}, {"type": "null"}]);
        self.bound("MigrationPatch", "downtime_ms", downtime);
        let processors = json!([
            {"type": "number", "const": 0},
            {"type": "number", "minimum": 0.01, "maximum": 1024},
            {"type": "null"},
        ]);
        self.bound("MigrationPatch", "processors", processors);
        let modes: Vec<&str> = CACHE_MODES.into_iter().map(cache_mode_name).collect();
        self.bound(
            "CachePatch",
            "mode",
            json!([{"type": "string", "enum": modes}, {"type": "null"}]),
        );
        let address = json!({"type": "string", "pattern": "^(/|nbds?://|nbds?\\+unix://)."});
        self.bound("CacheReplacement", "with", json!([address, {"type": "null"}]));
        let limit = |name: &str| {
            let most = if name.ends_with("-length") {
                u32::MAX.into()
            } else {
                RateLimit::MAX
            };
            json!({"type": "integer", "minimum": 0, "maximum": most})
        };
        let limits: Map<String, Value> = LimitName::all()
            .map(|row| (row.name.to_owned(), limit(row.name)))
            .collect();
        if let Some(Value::Object(schema)) = self.0.get_mut("LimitsState") {
            schema.insert("properties".to_owned(), Value::Object(limits));
            schema.insert("additionalProperties".to_owned(), json!(false));
            schema.remove("propertyNames");
        }
    }

    /// Replaces the schema of a property by a choice of schemas.
    fn bound(&mut self, name: &str, property: &str, any_of: Value) {
        let described = self.0[name]["properties"][property]["description"].clone();
        self.0[name]["properties"][property] = json!({"description": described, "anyOf": any_of});
    }
}
