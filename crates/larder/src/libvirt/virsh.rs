//! Access to libvirt, through its command `virsh`.

use std::ffi::OsStr;
use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow, bail};
use larder_vm::libvirt::xml::Element;

/// A connection to libvirt, by the URI that `virsh` gets.
pub(super) struct Virsh {
    connect: Option<String>,
}

/// A libvirt domain.
pub(super) struct Domain {
    /// XML of the domain for its next start, with its secrets.
    pub(super) xml: String,
    /// XML of the running domain; `None` if it does not run.
    pub(super) running: Option<String>,
}

impl Virsh {
    pub(super) fn new(connect: Option<String>) -> Self {
        Self { connect }
    }

    /// Runs a `virsh` command, and returns its output.
    fn run(&self, arguments: &[&OsStr], input: Option<&str>) -> anyhow::Result<String> {
        let mut command = Command::new("virsh");
        // Its messages are matched below, so they must not be translated.
        command.env("LC_ALL", "C").arg("--quiet");
        if let Some(uri) = &self.connect {
            command.args(["--connect", uri]);
        }
        command.args(arguments);
        command.stdin(match input {
            Some(_) => Stdio::piped(),
            None => Stdio::null(),
        });
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow!(
                "there is no virsh, which Larder needs to access libvirt; install it (Debian: libvirt-clients), or add its directory to $PATH"
            ),
            _ => anyhow!("cannot start virsh: {error}"),
        })?;
        if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
            // If virsh does not read all of its input, it reports the reason.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().context("virsh")?;
        if output.status.success() {
            return String::from_utf8(output.stdout).context("the output of virsh");
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let lines = stderr.lines().map(|line| line.trim_start_matches("error: ").trim());
        let stderr: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        let stderr = stderr.join(": ");
        bail!("libvirt: {stderr}{}", hint(&stderr))
    }

    fn query(&self, command: &str, options: &[&str], domain: &str) -> anyhow::Result<String> {
        let mut arguments = vec![OsStr::new(command), OsStr::new("--domain"), OsStr::new(domain)];
        arguments.extend(options.iter().map(OsStr::new));
        self.run(&arguments, None)
    }

    /// Returns a domain, by its name, UUID or number.
    ///
    /// # Errors
    /// There is no such domain, or its XML cannot be changed; the message contains advice.
    pub(super) fn domain(&self, name: &str) -> anyhow::Result<Domain> {
        let info = self.query("dominfo", &[], name)?;
        let value_of = |key: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.map(str::trim).unwrap_or_default()
        };
        if value_of("Persistent") == "no" {
            bail!("domain {name} is transient: it has no persistent XML; virsh define gives it one");
        }
        if value_of("Managed save") == "yes" {
            bail!(
                "domain {name} has a saved state, which refers to its present disks; start it and shut it down, or discard that state: virsh managedsave-remove {name}"
            );
        }
        let running = match value_of("State") {
            "shut off" | "crashed" => None,
            _ => Some(self.query("dumpxml", &[], name)?),
        };
        Ok(Domain { xml: self.query("dumpxml", &["--inactive", "--security-info"], name)?, running })
    }

    /// Defines a domain with this XML.
    pub(super) fn define(&self, xml: &str) -> anyhow::Result<()> {
        // The XML is not passed in a file, because it may contain passwords.
        let arguments = ["define", "/dev/stdin"].map(OsStr::new);
        self.run(&arguments, Some(xml)).map(|_| ())
    }

    /// Returns the capabilities of the host, which include its security models.
    pub(super) fn capabilities(&self) -> anyhow::Result<Element> {
        let xml = self.run(&[OsStr::new("capabilities")], None)?;
        Element::parse(&xml).context("libvirt's capabilities")
    }

    /// Returns true for the host's libvirt, false for that of a user, whose domains have no hooks.
    pub(super) fn is_system(&self) -> anyhow::Result<bool> {
        let uri = self.run(&[OsStr::new("uri")], None)?;
        let uri = uri.trim();
        Ok(uri.split('?').next().is_some_and(|uri| uri.ends_with("/system")))
    }
}

fn hint(said: &str) -> &'static str {
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if has(&["failed to get domain", "Domain not found"]) {
        "; virsh list --all shows the existing domains, also with --connect"
    } else if has(&["ermission denied", "authentication", "access denied", "cannot create user runtime"]) {
        "; run this as root, or as a user who may manage libvirt"
    } else if has(&["Failed to connect", "failed to connect", "no connection driver", "Cannot recv data"]) {
        "; is libvirtd running (systemctl start libvirtd), and is --connect correct?"
    } else {
        ""
    }
}
