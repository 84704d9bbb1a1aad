//! Fake QEMU.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Callback that runs when a command arrives, before it is executed.
pub(super) type Hook = Box<dyn FnMut() + Send>;

/// State of a fake QEMU, which tests inspect and change.
pub(super) struct FakeState {
    pub(super) run: &'static str,
    pub(super) migration: &'static str,
    pub(super) uuid: &'static str,
    /// Commands that were executed or refused, in order.
    pub(super) commands: Vec<String>,
    pub(super) capabilities: BTreeMap<String, bool>,
    pub(super) parameters: BTreeMap<String, Value>,
    pub(super) refuses: HashSet<&'static str>,
    /// Command during which QEMU exits.
    pub(super) exits_at: Option<&'static str>,
    pub(super) hooks: BTreeMap<&'static str, Hook>,
    /// Run state and migration status once everything was sent, or has arrived.
    pub(super) final_state: (&'static str, &'static str),
    /// Round counter of a migration that does not converge.
    pub(super) rounds: Option<u64>,
    has_exited: bool,
    /// Socket of the migration stream.
    stream: Option<UnixStream>,
}

/// Running fake QEMU.
pub(super) struct Qemu {
    pub(super) qmp: PathBuf,
    fake: Arc<Mutex<FakeState>>,
}

impl Qemu {
    fn start(dir: &Path, name: &str, run: &'static str, final_state: (&'static str, &'static str)) -> Self {
        let qmp = dir.join(name);
        let known = ["return-path", "multifd", "events", "postcopy-ram", "xbzrle", "late-block-activate"];
        let fake = FakeState {
            run,
            migration: "none",
            uuid: "9a8b7c6d-0000-1111-2222-333344445555",
            commands: Vec::new(),
            capabilities: known.map(|name| (name.to_owned(), name == "xbzrle")).into(),
            parameters: [("downtime-limit", json!(20)), ("multifd-channels", json!(8)), ("tls-creds", json!("tls0"))]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
            refuses: HashSet::new(),
            exits_at: None,
            hooks: BTreeMap::new(),
            final_state,
            rounds: None,
            has_exited: false,
            stream: None,
        };
        let fake = Arc::new(Mutex::new(fake));
        let listener = UnixListener::bind(&qmp).expect("binds");
        let shared = Arc::clone(&fake);
        thread::spawn(move || {
            for client in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(&client.expect("accepts"), &shared));
            }
        });
        Self { qmp, fake }
    }

    /// Starts a QEMU with a running VM.
    pub(super) fn source(dir: &Path) -> Self {
        Self::start(dir, "source", "running", ("postmigrate", "completed"))
    }

    /// Starts a QEMU that waits for a VM.
    pub(super) fn destination(dir: &Path) -> Self {
        Self::start(dir, "destination", "inmigrate", ("paused", "completed"))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, FakeState> {
        self.fake.lock().expect("no panic")
    }

    pub(super) fn hook(&self, command: &'static str, hook: impl FnMut() + Send + 'static) {
        self.state().hooks.insert(command, Box::new(hook));
    }

    pub(super) fn command_count(&self, command: &str) -> usize {
        self.state().commands.iter().filter(|received| *received == command).count()
    }

    pub(super) fn wait_until(&self, condition: impl Fn(&FakeState) -> bool) {
        let give_up = Instant::now() + Duration::from_secs(30);
        while !condition(&self.state()) {
            assert!(Instant::now() < give_up, "it does not come to that: {:?}", self.state().commands);
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn serve(client: &UnixStream, shared: &Arc<Mutex<FakeState>>) {
    let mut answer = client;
    if shared.lock().expect("no panic").has_exited {
        return;
    }
    let version = json!({"qemu": {"major": 10, "minor": 0, "micro": 3}});
    let mut send_line = |value: Value| writeln!(answer, "{value}").is_ok();
    send_line(json!({"QMP": {"version": version, "capabilities": ["oob"]}}));
    for line in BufReader::new(client).lines() {
        let Ok(line) = line else { return };
        let request: Value = serde_json::from_str(&line).expect("JSON");
        let command = request["execute"].as_str().or(request["exec-oob"].as_str()).expect("a command").to_owned();
        // The hook may inspect and change this QEMU.
        let hook = shared.lock().expect("no panic").hooks.remove(command.as_str());
        if let Some(mut hook) = hook {
            hook();
        }
        let result = execute(shared, &command, &request["arguments"]);
        if shared.lock().expect("no panic").has_exited {
            return;
        }
        // An event that arrived meanwhile, and the late answer to an earlier command.
        send_line(json!({"event": "NOTHING", "timestamp": {"seconds": u64::MAX, "microseconds": 7}}));
        send_line(json!({"id": 0, "error": {"desc": "a late answer"}}));
        let sent = match result {
            Ok(value) => send_line(json!({"return": value, "id": request["id"]})),
            Err(text) => send_line(json!({"error": {"class": "GenericError", "desc": text}, "id": request["id"]})),
        };
        if !sent {
            return;
        }
    }
}

fn execute(shared: &Arc<Mutex<FakeState>>, command: &str, arguments: &Value) -> Result<Value, String> {
    let mut fake = shared.lock().expect("no panic");
    fake.commands.push(command.to_owned());
    if fake.refuses.contains(command) {
        return Err("it does not want to".to_owned());
    }
    if fake.exits_at == Some(command) || command == "quit" {
        fake.has_exited = true;
        if let Some(socket) = fake.stream.take() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        return Ok(Value::Null);
    }
    Ok(match command {
        "query-status" => json!({"status": fake.run}),
        "query-migrate" if fake.migration == "none" => json!({}),
        // QEMU 7.2 reports this while it waits; later versions do too.
        "query-migrate" if fake.migration == "listens" => json!({"socket-address": [{"type": "unix"}]}),
        "query-migrate" => match &mut fake.rounds {
            None => json!({"status": fake.migration}),
            Some(round) => {
                *round += 1;
                let ram =
                    json!({"dirty-sync-count": *round, "remaining": 1 << 30, "total": 1 << 31, "page-size": 4096});
                json!({"status": fake.migration, "ram": ram})
            }
        },
        "query-uuid" => json!({"UUID": fake.uuid}),
        "query-chardev" => json!([{"label": "vda"}, {"label": "serial0"}]),
        "qom-get" if arguments["path"] == "/chardevs/vda" => json!({"type": "unix", "path": "/sockets/vda"}),
        "qom-get" if arguments["path"] == "/chardevs/serial0" => return Err("Property 'addr' not found".to_owned()),
        "qom-get" => json!("pc-i440fx-10.0-machine"),
        "query-memory-size-summary" => json!({"base-memory": 1 << 30}),
        "query-migrate-capabilities" => {
            fake.capabilities.iter().map(|(name, on)| json!({"capability": name, "state": on})).collect()
        }
        "migrate-set-capabilities" => {
            for entry in arguments["capabilities"].as_array().expect("a list") {
                let name = entry["capability"].as_str().expect("a name").to_owned();
                let on = entry["state"] == true;
                *fake.capabilities.get_mut(&name).ok_or("it knows no such thing")? = on;
            }
            json!({})
        }
        "query-migrate-parameters" => json!(fake.parameters),
        "migrate-set-parameters" => {
            let changes = arguments.as_object().expect("an object").clone();
            fake.parameters.extend(changes);
            json!({})
        }
        "stop" => {
            if fake.run == "running" {
                fake.run = "paused";
            }
            json!({})
        }
        "cont" => {
            fake.run = "running";
            json!({})
        }
        "migrate_cancel" => {
            if fake.migration == "active" {
                fake.migration = "cancelled";
                fake.run = "running";
            }
            json!({})
        }
        "migrate" => {
            let is_resume = arguments["resume"] == true;
            fake.migration = if is_resume { "postcopy-recover" } else { "active" };
            let socket = path(arguments);
            let shared = Arc::clone(shared);
            let socket = UnixStream::connect(socket).map_err(|error| error.to_string())?;
            thread::spawn(move || send(socket, &shared));
            json!({})
        }
        "migrate-incoming" | "migrate-recover" => {
            let is_resume = command == "migrate-recover";
            fake.migration = if is_resume { "postcopy-recover" } else { "setup" };
            let listener = UnixListener::bind(path(arguments)).map_err(|error| error.to_string())?;
            let shared = Arc::clone(shared);
            thread::spawn(move || receive(&listener, &shared));
            json!({})
        }
        _ => json!({}),
    })
}

fn path(arguments: &Value) -> PathBuf {
    let uri = arguments["uri"].as_str().expect("an URI");
    uri.strip_prefix("unix:").expect("a path").into()
}

/// Sends a stream that Larder does not understand and carries all the same.
fn send(mut socket: UnixStream, shared: &Mutex<FakeState>) {
    shared.lock().expect("no panic").stream = socket.try_clone().ok();
    let mut sent = socket.write_all(&[7; 100_000]);
    let continues = || {
        let fake = shared.lock().expect("no panic");
        fake.rounds.is_some() && fake.migration == "active"
    };
    while sent.is_ok() && continues() {
        sent = socket.write_all(&[7; 4096]);
        thread::sleep(Duration::from_millis(2));
    }
    // The destination confirms that it has the stream.
    let done = sent.and_then(|()| socket.read_exact(&mut [0]));
    let mut fake = shared.lock().expect("no panic");
    fake.stream = None;
    if matches!(fake.migration, "active" | "postcopy-recover") {
        (fake.run, fake.migration) = match done {
            Ok(()) => fake.final_state,
            Err(_) => ("running", "failed"),
        };
    }
}

fn receive(listener: &UnixListener, shared: &Mutex<FakeState>) {
    let (mut socket, _) = listener.accept().expect("accepts");
    shared.lock().expect("no panic").stream = socket.try_clone().ok();
    let done = socket.read_exact(&mut vec![0; 100_000]);
    let mut fake = shared.lock().expect("no panic");
    if done.is_err() {
        // QEMU exits here too.
        fake.has_exited = true;
        return;
    }
    (fake.run, fake.migration) = fake.final_state;
    let confirms = match fake.final_state.1 {
        "failed" => {
            fake.stream = None;
            return;
        }
        other => other != "active",
    };
    drop(fake);
    if confirms {
        let _ = socket.write_all(&[1]);
    }
    while socket.read(&mut [0; 65536]).is_ok_and(|len| len > 0) {}
    shared.lock().expect("no panic").stream = None;
}
