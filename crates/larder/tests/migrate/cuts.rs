//! Failures in a session that does not reconnect: the remaining side soon ends with a failure and its reason, and
//! neither QEMU takes a partial stream for a complete one.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::ends::{Between, Received, Waiting, main_channel, was_closed, write};
use crate::support::{TEST_TIMEOUT, test_pattern};

/// Progress of a session at which something fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No QEMU has connected.
    Idle,
    /// The first bytes have arrived.
    Begun,
    /// Frames are in flight on all lanes.
    Middle,
    /// The destination's QEMU reads nothing, and the window is full.
    Full,
    /// Everything has arrived, but no QEMU has closed its end.
    Last,
}

const STAGES: [Stage; 5] = [Stage::Idle, Stage::Begun, Stage::Middle, Stage::Full, Stage::Last];

/// Bytes that a sender allows in flight before it has measured the link.
const WINDOW: u64 = 4 << 20;

/// A session at a stage.
struct Session {
    stage: Stage,
    between: Between,
    stream: Vec<u8>,
    qemu: Option<Qemu>,
}

/// Sockets that stand for QEMU on both sides.
struct Qemu {
    source: UnixStream,
    destination: UnixStream,
    received: Option<Received>,
}

impl Session {
    fn at(stage: Stage) -> Self {
        let mut session = Self {
            stage,
            between: Waiting::start(&[]).joined(&["--patience", "0"]),
            stream: match stage {
                // Incompressible, and more than the window.
                Stage::Full => test_pattern(1, 48 << 20),
                _ => main_channel(2000),
            },
            qemu: None,
        };
        if stage != Stage::Idle {
            session.begin();
        }
        session
    }

    fn begin(&mut self) {
        let Self { stage, between, stream, qemu } = self;
        let len = if *stage == Stage::Begun { 100 } else { stream.len() };
        if *stage == Stage::Middle {
            between.relay.hold_at(2_000_000);
        }
        let source = between.source();
        // The writing lasts as long as the socket is open.
        write(source.try_clone().expect("a socket"), stream[..len].to_vec());
        let destination = between.destination();
        let received = (*stage != Stage::Full).then(|| Received::from(destination.try_clone().expect("a socket")));
        match (*stage, &received) {
            (Stage::Middle, _) => between.relay.wait_until_held(TEST_TIMEOUT).expect("it carries so much"),
            (Stage::Full, _) => between.relay.wait_until_full(WINDOW - (600 << 10), TEST_TIMEOUT).expect("so much"),
            (_, Some(received)) => received.wait_for(len),
            _ => {}
        }
        *qemu = Some(Qemu { source, destination, received });
    }

    /// Asserts that both sides fail, and that both QEMUs' ends are closed. Returns the output of sender and receiver.
    fn fails(mut self) -> [String; 2] {
        let said = self.between.fail();
        let Some(qemu) = self.qemu else { return said };
        assert!(was_closed(&qemu.source), "{:?}", self.stage);
        let received = qemu.received.unwrap_or_else(|| Received::from(qemu.destination)).end();
        assert!(self.stream.starts_with(&received), "{:?}: other bytes arrived", self.stage);
        let all = received.len() == self.stream.len();
        assert_eq!(all, self.stage == Stage::Last, "{:?}: {} bytes", self.stage, received.len());
        said
    }
}

/// Asserts that a failure at each of these stages makes both sides, or the remaining one, report one of these texts.
fn breaks(stages: &[Stage], breaks: impl Fn(&mut Session), sender: &[&str], receiver: &[&str]) {
    for &stage in stages {
        let mut session = Session::at(stage);
        breaks(&mut session);
        let said = session.fails();
        for (said, texts) in said.iter().zip([sender, receiver]) {
            let told = texts.is_empty() || texts.iter().any(|text| said.contains(text));
            assert!(told, "{stage:?}: not {texts:?}, but:\n{said}");
        }
    }
}

const CUT_OFF: &str = "or something between the hosts cut the connection";
const NETWORK: &str = "nothing was received from the other side for 10 s: its host or the network is down";

#[test]
fn killed_sender_is_noticed_at_once() {
    breaks(&STAGES, |session| session.between.sender.process.kill(), &[], &[CUT_OFF]);
}

#[test]
fn killed_receiver_is_noticed_at_once() {
    let lane = "the connection to the receiver: ";
    breaks(&STAGES, |session| session.between.receiver.process.kill(), &[CUT_OFF, lane], &[]);
}

#[test]
fn cut_connections_fail_both_ends() {
    let texts = [CUT_OFF, "the connection to the receiver: ", "reading a frame: "];
    breaks(&STAGES, |session| session.between.relay.cut(), &texts, &texts);
    breaks(&STAGES, |session| session.between.relay.cut_connection(0), &texts, &texts);
}

#[test]
fn cut_idle_lane_is_noticed() {
    let texts = [CUT_OFF, "the connection to the receiver: ", "reading a frame: "];
    for lane in [1, 2] {
        breaks(&STAGES, |session| session.between.relay.cut_connection(lane), &texts, &texts);
    }
}

#[test]
fn silent_network_is_given_up() {
    std::thread::scope(|scope| {
        for stage in STAGES {
            scope.spawn(move || breaks(&[stage], |session| session.between.relay.stall(), &[NETWORK], &[NETWORK]));
        }
    });
}

#[test]
fn destination_exit_is_a_failure() {
    let text = "the migration did not end properly: the destination's QEMU has closed its end, or has exited";
    let ends = |session: &mut Session| {
        let qemu = session.qemu.as_mut().expect("begun");
        qemu.destination.shutdown(Shutdown::Both).expect("a socket");
        session.between.relay.release();
        // The source keeps sending until it gets the failure; at the later stage it already is.
        if session.stage == Stage::Begun {
            write(qemu.source.try_clone().expect("a socket"), session.stream[100..].to_vec());
        }
    };
    breaks(&[Stage::Begun, Stage::Middle], ends, &[text], &[text]);
}

#[test]
fn destination_exit_at_full_window_noticed() {
    let mut session = Session::at(Stage::Full);
    let qemu = session.qemu.take().expect("begun");
    drop(qemu.destination);
    assert!(was_closed(&qemu.source));
    // These bytes are no migration stream, so Larder does not know how the migration ended.
    session.between.succeed();
}

#[test]
fn source_exit_is_a_failure() {
    let text = "the migration did not end properly: the source's QEMU has cancelled it, aborted it, or exited";
    let ends = |session: &mut Session| {
        let qemu = session.qemu.as_mut().expect("begun");
        qemu.source.shutdown(Shutdown::Both).expect("a socket");
        session.between.relay.release();
        // The destination gets the failure, and ends too.
        let received = qemu.received.take().expect("begun").end();
        assert!(session.stream.starts_with(&received) && received.len() < session.stream.len());
        qemu.destination.shutdown(Shutdown::Both).expect("a socket");
        qemu.received = Some(Received::of(received));
    };
    breaks(&[Stage::Begun, Stage::Middle], ends, &[text], &[text]);
}

#[test]
fn stopped_side_informs_its_peer() {
    let stopped = ["larder: stopped"];
    let by = ["larder: the sender: stopped"];
    let term = |session: &mut Session| session.between.sender.process.signal(libc::SIGTERM);
    breaks(&STAGES, term, &stopped, &by);
    let by = ["larder: the receiver: stopped"];
    let term = |session: &mut Session| session.between.receiver.process.signal(libc::SIGTERM);
    breaks(&STAGES, term, &by, &stopped);
}

#[test]
fn missing_qemu_is_reported_by_both() {
    let mut between = Between::start();
    std::fs::remove_file(between.path("qemu")).expect("a socket");
    let source = between.source();
    let [sender, receiver] = between.fail();
    let text = format!(
        "cannot connect to QEMU at {}: No such file or directory (os error 2); was it started with '-incoming unix:",
        between.path("qemu").display()
    );
    assert!(receiver.contains(&format!("larder: {text}")), "{receiver}");
    assert!(sender.contains(&format!("larder: the receiver: {text}")), "{sender}");
    assert!(was_closed(&source));
}
