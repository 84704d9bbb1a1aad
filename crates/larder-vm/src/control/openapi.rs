//! The OpenAPI document that describes the control socket. The schemas of answers and bodies are derived from their
//! types.

use larder_block::ByteLen;
use larder_block::filter::throttle::Limit;
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
    let no_http = || fails("400", "This is no request as HTTP/1.1 has them.");
    let stuck = || {
        fails(
            "503",
            "The disk is being closed, or its thread does not answer, because its storage is stuck.",
        )
    };
    let bad_body = || fails("400", "The body is not such an object, or says what cannot be.");
    let unknown = || fails("404", "There is no such disk.");
    let done = |what: &str| ("200".to_owned(), described(what, &disk));
    let goes_on = || {
        let what = "It takes longer than 2 s, and goes on; `flush` of its cache tells when it has ended, and how.";
        ("202".to_owned(), described(what, &disk))
    };
    let no_memory = || fails("404", "This process manages no memory.");
    let memory_is = || ("200".to_owned(), described("The memory.", &memory));
    let memory_over = || {
        fails(
            "503",
            "It was detached from, or its process has ended, or the thread does not answer.",
        )
    };
    let no_migration = || fails("404", "This process moves no virtual machine.");
    let migration_is = || ("200".to_owned(), described("The move.", &migration));
    let refused = || fails("409", "It cannot be done; `error` says why.");
    let of_disk = json!([{
        "name": "disk",
        "in": "path",
        "required": true,
        "description": "The disk's name, or its place in the list of disks, from 0 on.",
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
                "summary": "What the process is.",
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
                "summary": "What happens, as it does: server-sent events.",
                "description": "First those that are still known, the last 256 at most, then each as it happens, without an end; the data of each is an Event. A client that has listened before sends the id of the last one that it has got in Last-Event-ID.",
                "parameters": [{
                    "name": "Last-Event-ID",
                    "in": "header",
                    "description": "Only those that came after this one are wanted.",
                    "schema": {"type": "string"},
                }],
                "responses": responses([
                    ("200".to_owned(), json!({
                        "description": "The events.",
                        "content": {"text/event-stream": {"schema": {"type": "string"}}},
                    })),
                    no_http(),
                    fails("503", "There are too many who listen."),
                ]),
            }},
            RELOAD_PATH: {"post": {
                "operationId": "reload",
                "summary": "Read the VM's file again, and change what can be changed while the VM runs.",
                "responses": responses([
                    ("200".to_owned(), described("It has been read; what has become of it.", &reloaded)),
                    ("202".to_owned(), described("It takes longer than 8 s, and goes on.", &reloaded)),
                    fails("400", "This is no request as HTTP/1.1 has them, or it has a body."),
                    fails("409", "There is no such file, or it is wrong; nothing has changed."),
                    fails("503", "The server is being stopped."),
                ]),
            }},
            MOVE_PATH: {"post": {
                "operationId": "move",
                "summary": "Have the VM's disks take a step to another host, or from there, as its movers tell.",
                "requestBody": body(&move_wish),
                "responses": responses([
                    ("200".to_owned(), described("It is done.", &moved)),
                    ("202".to_owned(), described("It takes longer than 8 s, and goes on; or the server ends: ask again.", &moved)),
                    bad_body(),
                    fails("409", "It cannot be done; `error` says why. All is as before."),
                ]),
            }},
            MIGRATION_PATH: {
                "get": {
                    "operationId": "query-migration",
                    "summary": "The virtual machine that the process moves.",
                    "responses": responses([migration_is(), no_http(), no_migration()]),
                },
                "patch": {
                    "operationId": "limit-migration",
                    "summary": "Change what the move may take, from now on.",
                    "requestBody": body(&migration_patch),
                    "responses": responses([migration_is(), bad_body(), no_migration(), refused()]),
                },
            },
            CANCEL_PATH: {"post": {
                "operationId": "cancel-migration",
                "summary": "Cancel the move, as SIGINT does: the virtual machine stays where it is, as long as that can be.",
                "responses": responses([
                    ("202".to_owned(), described("It was told; `phase` says what becomes of it.", &cancelling)),
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
                    "summary": "Set how much memory may be used.",
                    "requestBody": body(&memory_patch),
                    "responses": responses([memory_is(), bad_body(), no_memory(), refused(), memory_over()]),
                },
            },
            DETACH_PATH: {"post": {
                "operationId": "detach-memory",
                "summary": "Bring all pages back, and leave the process as it was.",
                "responses": responses([
                    ("200".to_owned(), described("It is done.", &detached)),
                    ("202".to_owned(), described("It takes longer than 2 s, and continues. If it is stopped, `detaching` becomes false, and `detach_problem` says why.", &detached)),
                    no_http(), no_memory(), refused(), memory_over(),
                ]),
            }},
            CANCEL_DETACH_PATH: {"post": {
                "operationId": "cancel-detach-memory",
                "summary": "Stop a detach that is under way, and keep the memory within its budget again.",
                "responses": responses([
                    ("202".to_owned(), described("It is stopped; `detaching` becomes false.", &cancelling)),
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
                    "summary": "Change what a disk is set to.",
                    "requestBody": body(&patch),
                    "responses": responses([done("It is so now."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/hot"): {
                "parameters": of_disk,
                "get": {
                    "operationId": "query-hot",
                    "summary": "What of a disk is hot, as far as its cache knows.",
                    "responses": responses([
                        ("200".to_owned(), described("It; nothing if the disk has no cache.", &hot)),
                        no_http(), unknown(), stuck(),
                    ]),
                },
                "post": {
                    "operationId": "warm-disk",
                    "summary": "Bring into a disk's cache what was hot on another host, while its guest asks for nothing.",
                    "requestBody": body(&hot),
                    "responses": responses([done("It is being done, as far as there is a cache with room."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/flush"): {
                "parameters": of_disk,
                "post": {
                    "operationId": "flush-cache",
                    "summary": "Write to a disk what only its cache has.",
                    "responses": responses([done("The disk has it all."), goes_on(), no_http(), unknown(), refused(), stuck()]),
                },
            },
            format!("{DISKS_PATH}/{{disk}}/cache/replace"): {
                "parameters": of_disk,
                "post": {
                    "operationId": "replace-cache",
                    "summary": "Give a disk another cache, or its cache again that had failed.",
                    "requestBody": body(&replacement),
                    "responses": responses([done("It has that cache."), goes_on(), bad_body(), unknown(), refused(), stuck()]),
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
                Limit::MAX
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
