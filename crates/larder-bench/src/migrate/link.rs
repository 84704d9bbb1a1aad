//! The link between the two hosts: two network namespaces joined by a veth pair, with limited bandwidth in each
//! direction.

use std::fmt;
use std::fs;
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context, ensure};

use crate::undo::Undo;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Speed {
    /// Bandwidth in Mbit/s.
    Limited(u32),
    /// One namespace, and its loopback.
    Loopback,
}

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(mbit @ 1..) => Ok(Self::Limited(mbit)),
            _ if text == "none" => Ok(Self::Loopback),
            _ => Err("expected a number of Mbit/s, at least 1, or none".to_owned()),
        }
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(mbit) => write!(out, "{mbit}"),
            Self::Loopback => write!(out, "none"),
        }
    }
}

impl Speed {
    /// Returns the speed as readable text.
    pub(super) fn words(self) -> String {
        match self {
            Self::Limited(mbit) => format!("{mbit} Mbit/s"),
            Self::Loopback => "loopback".to_owned(),
        }
    }
}

/// One of the two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    A,
    B,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Name of the device in each namespace.
const DEVICE_NAME: &str = "larder0";
/// Removes the names; a namespace itself lasts until its processes have ended.
const REMOVE: &str = r#"for name; do [ ! -e "/run/netns/$name" ] || ip netns del "$name" || exit; done"#;

/// The namespaces, removed when this is dropped or the process ends.
pub(super) struct Link {
    pub(super) speed: Speed,
    namespaces: [String; 2],
    _undo: Undo,
}

impl Link {
    pub(super) fn new(speed: Speed) -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "this needs root: creating network namespaces");
        let process = std::process::id();
        let name = |end: &str| format!("larder-bench-{process}-{end}");
        let namespaces = match speed {
            Speed::Limited(_) => vec![name("a"), name("b")],
            Speed::Loopback => vec![name("a")],
        };
        let this = Self {
            speed,
            namespaces: [namespaces[0].clone(), namespaces[namespaces.len() - 1].clone()],
            _undo: Undo::new(REMOVE, &namespaces)?,
        };
        for namespace in &namespaces {
            run_command(&format!("ip netns add {namespace}"))?;
            run_command(&format!("ip -n {namespace} link set lo up"))?;
        }
        if let Speed::Limited(mbit) = speed {
            this.join(mbit)?;
        }
        Ok(this)
    }

    fn join(&self, mbit: u32) -> anyhow::Result<()> {
        let [a, b] = &self.namespaces;
        run_command(&format!("ip link add {DEVICE_NAME} netns {a} type veth peer name {DEVICE_NAME} netns {b}"))?;
        for side in [Side::A, Side::B] {
            let (namespace, address) = (self.namespace(side), self.address(side));
            run_command(&format!("ip -n {namespace} addr add {address}/24 dev {DEVICE_NAME}"))?;
            run_command(&format!("ip -n {namespace} link set {DEVICE_NAME} up"))?;
            // The device sends packets of 64 KiB, several of which must fit into the burst.
            run_command(&format!(
                "tc -n {namespace} qdisc add dev {DEVICE_NAME} root tbf rate {mbit}mbit burst 256kb latency 20ms"
            ))?;
        }
        Ok(())
    }

    fn namespace(&self, side: Side) -> &str {
        &self.namespaces[side as usize]
    }

    /// Returns the command prefix that runs a command on that host.
    pub(super) fn enter(&self, side: Side) -> [&str; 4] {
        ["ip", "netns", "exec", self.namespace(side)]
    }

    pub(super) fn address(&self, side: Side) -> &'static str {
        match (self.speed, side) {
            (Speed::Loopback, _) => "127.0.0.1",
            (_, Side::A) => "10.9.0.1",
            (_, Side::B) => "10.9.0.2",
        }
    }

    /// Returns the bytes sent from, and received at, the host of this process; over loopback all count as sent.
    pub(super) fn carried(&self, process: u32) -> anyhow::Result<[u64; 2]> {
        const RECEIVED_FIELD: usize = 0;
        const SENT_FIELD: usize = 8;
        let device = match self.speed {
            Speed::Limited(_) => DEVICE_NAME,
            Speed::Loopback => "lo",
        };
        let path = format!("/proc/{process}/net/dev");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
        let counters: Vec<u64> = line
            .with_context(|| format!("{path} has no {device}"))?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        ensure!(counters.len() > SENT_FIELD, "{path} has an unknown format: {text}");
        let received = match self.speed {
            Speed::Limited(_) => counters[RECEIVED_FIELD],
            Speed::Loopback => 0,
        };
        Ok([counters[SENT_FIELD], received])
    }
}

fn run_command(line: &str) -> anyhow::Result<()> {
    let mut arguments = line.split(' ');
    let program = arguments.next().unwrap_or_default();
    let output = Command::new(program).args(arguments).output().with_context(|| format!("running {program}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{line}: {}", stderr.trim());
    Ok(())
}
