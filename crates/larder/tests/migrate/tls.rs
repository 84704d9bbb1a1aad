//! TLS: who may send to whom.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use larder_bench::campaign::migration::relay::{Tamper, Way};
use tempfile::TempDir;

use crate::ends::{Waiting, carries};
use crate::support::{LIMIT, certificates, on_tmpfs, run};

/// An authority, and certificates of it for a sender, and for receivers.
pub(crate) struct Authority(TempDir);

impl Authority {
    pub(crate) fn new() -> Self {
        let this = Self(on_tmpfs());
        certificates::authority(this.0.path());
        this.sign("client", "clientAuth", "DNS:source.example");
        this.sign("server", "serverAuth", certificates::LOCALHOST);
        this
    }

    fn sign(&self, name: &str, usage: &str, names: &str) {
        certificates::sign(self.0.path(), name, usage, names);
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    pub(crate) fn words(&self) -> [&str; 2] {
        ["--tls", self.0.path().to_str().expect("UTF-8")]
    }

    fn fingerprint(&self, name: &str) -> String {
        let mut command = Command::new("openssl");
        command.current_dir(self.0.path());
        command.args([
            "x509",
            "-noout",
            "-fingerprint",
            "-sha256",
            "-in",
            &format!("{name}-cert.pem"),
        ]);
        let said = succeed(command);
        said.trim()
            .rsplit('=')
            .next()
            .expect("sha256 Fingerprint=...")
            .to_owned()
    }

    /// Has this one's certificate of that name from another authority.
    fn with(self, other: &Self, name: &str) -> Self {
        for part in ["cert", "key"] {
            let file = format!("{name}-{part}.pem");
            std::fs::copy(other.path().join(&file), self.path().join(&file)).expect("a copy");
        }
        self
    }

    /// Another folder with the same files.
    fn copy(&self) -> Self {
        let copy = Self(on_tmpfs());
        for entry in std::fs::read_dir(self.0.path()).expect("a folder").flatten() {
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a copy");
        }
        copy
    }
}

fn succeed(mut command: Command) -> String {
    let output = command.output().expect("openssl; testbed/setup.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A sender is refused, both sides say why, and QEMU is not troubled; then the right one comes.
fn refused([sender, receiver]: [&[&str]; 2], [by_sender, by_receiver]: [&str; 2], right: &[&str]) {
    let waiting = Waiting::start(receiver);
    let said = waiting.refuses(sender);
    assert!(said.contains(by_sender), "not '{by_sender}', but:\n{said}");
    waiting
        .receiver
        .process
        .wait_for(by_receiver, LIMIT)
        .expect("it says so");
    assert!(waiting.is_untouched());
    carries(&mut waiting.joined(right), 200);
}

/// Sees whether something readable goes by.
struct Eavesdropper(Arc<Mutex<Vec<u8>>>);

impl Tamper for Eavesdropper {
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        self.0.lock().expect("whole").extend_from_slice(bytes);
        out.extend_from_slice(bytes);
        true
    }
}

#[test]
fn a_session_over_tls_carries_every_byte_and_shows_none() {
    let authority = Authority::new();
    let words = authority.words();
    let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
    let tap = Arc::clone(&heard);
    let tamper = move |_, _: Way| Some(Box::new(Eavesdropper(Arc::clone(&tap))) as Box<dyn Tamper>);
    let mut between = Waiting::start(&words).joined_by(&words, tamper);
    carries(&mut between, 2000);
    let heard = heard.lock().expect("whole");
    for shown in [&b"LARDMIG"[..], b"LFRM", b"pc.ram", &[1; 100]] {
        assert!(!heard.windows(shown.len()).any(|bytes| bytes == shown), "{shown:?}");
    }
}

#[test]
fn a_sender_of_another_authority_is_refused() {
    let (right, other) = (Authority::new(), Authority::new());
    let wrong = right.copy().with(&other, "client");
    refused(
        [&wrong.words(), &right.words()],
        [
            "does not accept this one's certificate",
            "the TLS handshake failed: invalid peer certificate: UnknownIssuer",
        ],
        &right.words(),
    );
}

#[test]
fn a_sender_without_a_certificate_is_refused() {
    let right = Authority::new();
    let waiting = Waiting::start(&right.words());
    let mut command = Command::new("openssl");
    command.current_dir(right.path());
    command.args(["s_client", "-CAfile", "ca-cert.pem", "-verify_return_error", "-connect"]);
    command.arg(waiting.receiver.address().to_string());
    let (_, said) = run(command);
    assert!(said.contains("alert certificate required"), "{said}");
    let said = waiting
        .receiver
        .process
        .wait_for("the TLS handshake failed: peer sent no certificates", LIMIT);
    said.expect("it says so");
    carries(&mut waiting.joined(&right.words()), 200);
}

#[test]
fn a_receiver_of_another_authority_is_refused() {
    let (right, other) = (Authority::new(), Authority::new());
    let receiver = right.copy().with(&other, "server");
    let wants_other = right.copy();
    std::fs::copy(other.path().join("ca-cert.pem"), wants_other.path().join("ca-cert.pem")).expect("a copy");
    refused(
        [&right.words(), &receiver.words()],
        [
            "the TLS handshake failed: invalid peer certificate: UnknownIssuer",
            "the TLS handshake failed: received fatal alert",
        ],
        &wants_other.words(),
    );
}

#[test]
fn a_receiver_with_another_name_is_refused() {
    let right = Authority::new();
    let elsewhere = right.copy();
    elsewhere.sign("server", "serverAuth", "DNS:other.example");
    let waiting = Waiting::start(&elsewhere.words());
    let said = waiting.refuses(&right.words());
    assert!(said.contains("certificate not valid for name \"127.0.0.1\""), "{said}");
    let said = waiting
        .receiver
        .process
        .wait_for("the TLS handshake failed: received fatal alert", LIMIT);
    said.expect("it says so");
    assert!(waiting.is_untouched());
}

#[test]
fn only_a_peer_with_one_of_the_fingerprints_is_taken() {
    let right = Authority::new();
    let (server, client) = (right.fingerprint("server"), right.fingerprint("client"));
    let wrong = "00:".repeat(31) + "00";
    let [tls, folder] = right.words();
    let to_server = [tls, folder, "--peer", &wrong, "--peer", &server];
    let to_client = [tls, folder, "--peer", &client, "--peer", &wrong];
    let to_wrong = [tls, folder, "--peer", &wrong];
    let none = "which is none of those that were given";
    refused(
        [&to_wrong, &to_client],
        [none, "the greeting of a sender: "],
        &to_server,
    );
    let waiting = Waiting::start(&to_wrong);
    let said = waiting.refuses(&to_server);
    let hex = client.replace(':', "").to_lowercase();
    assert!(
        said.contains(&format!(
            "larder: the receiver refuses: the other side's certificate has the fingerprint {hex}, {none}"
        )),
        "{said}"
    );
    waiting.receiver.process.wait_for(none, LIMIT).expect("it says so");
    assert!(waiting.is_untouched());
}

#[test]
fn with_tls_on_one_side_only_both_say_so() {
    let right = Authority::new();
    refused(
        [&[], &right.words()],
        ["it speaks TLS: give --tls", "it does not speak TLS"],
        &right.words(),
    );
    refused(
        [&right.words(), &[]],
        ["has the receiver --tls?", "it speaks TLS: give --tls"],
        &[],
    );
}
