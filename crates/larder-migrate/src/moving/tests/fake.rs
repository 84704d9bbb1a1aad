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
pub(super) struct Fake {
    pub(super) run: &'static str,
    pub(super) migration: &'static str,
    pub(super) uuid: &'static str,
    /// Commands that were executed or refused, in order.
    pub(super) heard: Vec<String>,
    pub(super) capabilities: BTreeMap<String, bool>,
    pub(super) parameters: BTreeMap<String, Value>,
    pub(super) refuses: HashSet<&'static str>,
    /// Command during which QEMU exits.
    pub(super) dies_at: Option<&'static str>,
    pub(super) hooks: BTreeMap<&'static str, Hook>,
    /// Run state and migration status once everything was sent, or has arrived.
    pub(super) comes_to: (&'static str, &'static str),
    /// Round counter of a migration that does not converge.
    pub(super) rounds: Option<u64>,
    is_dead: bool,
    /// Socket of the migration stream.
    stream: Option<UnixStream>,
}

/// Running fake QEMU.
pub(super) struct Qemu {
    pub(super) qmp: PathBuf,
    fake: Arc<Mutex<Fake>>,
}

impl Qemu {
    fn start(folder: &Path, name: &str, run: &'static str, comes_to: (&'static str, &'static str)) -> Self {
        let qmp = folder.join(name);
        let known = [
            "return-path",
            "multifd",
            "events",
            "postcopy-ram",
            "xbzrle",
            "late-block-activate",
        ];
        let fake = Fake {
            run,
            migration: "none",
            uuid: "9a8b7c6d-0000-1111-2222-333344445555",
            heard: Vec::new(),
            capabilities: known.map(|name| (name.to_owned(), name == "xbzrle")).into(),
            parameters: [
                ("downtime-limit", json!(20)),
                ("multifd-channels", json!(8)),
                ("tls-creds", json!("tls0")),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into(),
            refuses: HashSet::new(),
            dies_at: None,
            hooks: BTreeMap::new(),
            comes_to,
            rounds: None,
            is_dead: false,
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
    pub(super) fn source(folder: &Path) -> Self {
        Self::start(folder, "source", "running", ("postmigrate", "completed"))
    }

    /// Starts a QEMU that waits for a VM.
    pub(super) fn destination(folder: &Path) -> Self {
        Self::start(folder, "destination", "inmigrate", ("paused", "completed"))
    }

    pub(super) fn is(&self) -> MutexGuard<'_, Fake> {
        self.fake.lock().expect("no panic")
    }

    pub(super) fn hook(&self, command: &'static str, hook: impl FnMut() + Send + 'static) {
        self.is().hooks.insert(command, Box::new(hook));
    }

    pub(super) fn has_heard(&self, command: &str) -> usize {
        self.is().heard.iter().filter(|heard| *heard == command).count()
    }

    pub(super) fn wait_until(&self, what: impl Fn(&Fake) -> bool) {
        let give_up = Instant::now() + Duration::from_secs(30);
        while !what(&self.is()) {
            assert!(
                Instant::now() < give_up,
                "it does not come to that: {:?}",
                self.is().heard
            );
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn serve(client: &UnixStream, shared: &Arc<Mutex<Fake>>) {
    let mut answer = client;
    if shared.lock().expect("no panic").is_dead {
        return;
    }
    let version = json!({"qemu": {"major": 10, "minor": 0, "micro": 3}});
    let mut say = |value: Value| writeln!(answer, "{value}").is_ok();
    say(json!({"QMP": {"version": version, "capabilities": ["oob"]}}));
    for line in BufReader::new(client).lines() {
        let Ok(line) = line else { return };
        let asked: Value = serde_json::from_str(&line).expect("JSON");
        let command = asked["execute"]
            .as_str()
            .or(asked["exec-oob"].as_str())
            .expect("a command")
            .to_owned();
        // The hook may inspect and change this QEMU.
        let hook = shared.lock().expect("no panic").hooks.remove(command.as_str());
        if let Some(mut hook) = hook {
            hook();
        }
        let result = carry_out(shared, &command, &asked["arguments"]);
        if shared.lock().expect("no panic").is_dead {
            return;
        }
        // An event that arrived meanwhile, and the late answer to an earlier command.
        say(json!({"event": "NOTHING", "timestamp": {"seconds": u64::MAX, "microseconds": 7}}));
        say(json!({"id": 0, "error": {"desc": "a late answer"}}));
        let known = match result {
            Ok(value) => say(json!({"return": value, "id": asked["id"]})),
            Err(text) => say(json!({"error": {"class": "GenericError", "desc": text}, "id": asked["id"]})),
        };
        if !known {
            return;
        }
    }
}

fn carry_out(shared: &Arc<Mutex<Fake>>, command: &str, arguments: &Value) -> Result<Value, String> {
    let mut fake = shared.lock().expect("no panic");
    fake.heard.push(command.to_owned());
    if fake.refuses.contains(command) {
        return Err("it does not want to".to_owned());
    }
    if fake.dies_at == Some(command) || command == "quit" {
        fake.is_dead = true;
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
        "query-migrate-capabilities" => fake
            .capabilities
            .iter()
            .map(|(name, on)| json!({"capability": name, "state": on}))
            .collect(),
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
            let resumes = arguments["resume"] == true;
            fake.migration = if resumes { "postcopy-recover" } else { "active" };
            let socket = path(arguments);
            let shared = Arc::clone(shared);
            let socket = UnixStream::connect(socket).map_err(|error| error.to_string())?;
            thread::spawn(move || send(socket, &shared));
            json!({})
        }
        "migrate-incoming" | "migrate-recover" => {
            let resumes = command == "migrate-recover";
            fake.migration = if resumes { "postcopy-recover" } else { "setup" };
            let listener = UnixListener::bind(path(arguments)).map_err(|error| error.to_string())?;
            let shared = Arc::clone(shared);
            thread::spawn(move || take_in(&listener, &shared));
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
fn send(mut socket: UnixStream, shared: &Mutex<Fake>) {
    shared.lock().expect("no panic").stream = socket.try_clone().ok();
    let mut sent = socket.write_all(&[7; 100_000]);
    let goes_on = || {
        let fake = shared.lock().expect("no panic");
        fake.rounds.is_some() && fake.migration == "active"
    };
    while sent.is_ok() && goes_on() {
        sent = socket.write_all(&[7; 4096]);
        thread::sleep(Duration::from_millis(2));
    }
    // The destination confirms that it has the stream.
    let done = sent.and_then(|()| socket.read_exact(&mut [0]));
    let mut fake = shared.lock().expect("no panic");
    fake.stream = None;
    if matches!(fake.migration, "active" | "postcopy-recover") {
        (fake.run, fake.migration) = match done {
            Ok(()) => fake.comes_to,
            Err(_) => ("running", "failed"),
        };
    }
}

fn take_in(listener: &UnixListener, shared: &Mutex<Fake>) {
    let (mut socket, _) = listener.accept().expect("accepts");
    shared.lock().expect("no panic").stream = socket.try_clone().ok();
    let done = socket.read_exact(&mut vec![0; 100_000]);
    let mut fake = shared.lock().expect("no panic");
    if done.is_err() {
        // QEMU exits here too.
        fake.is_dead = true;
        return;
    }
    (fake.run, fake.migration) = fake.comes_to;
    let says_so = match fake.comes_to.1 {
        "failed" => {
            fake.stream = None;
            return;
        }
        other => other != "active",
    };
    drop(fake);
    if says_so {
        let _ = socket.write_all(&[1]);
    }
    while socket.read(&mut [0; 65536]).is_ok_and(|len| len > 0) {}
    shared.lock().expect("no panic").stream = None;
}
