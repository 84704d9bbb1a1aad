//! libvirt's hook, called as libvirt calls it.

use std::fs;

use larder_bench::campaign::process::install_script;

use crate::host::Host;

const FILE: &str = "[[disk]]\nimage = \"/run/disk.raw\"\nformat = \"raw\"\n";
const HOOK: &str = "/etc/libvirt/hooks/qemu.d/larder";

fn xml(socket: &str) -> String {
    format!(
        "<domain><name>web</name><devices><disk type='vhostuser'><source type='unix' path='{socket}'/><target dev='vda' bus='virtio'/></disk></devices></domain>"
    )
}

/// Returns a host on which the VM `web` has a file.
fn host() -> Host {
    let host = Host::new();
    host.works(&["sh", "-c", "mkdir -p /etc/larder/vms && truncate -s 1M /run/disk.raw"]);
    fs::write(host.inside("/etc/larder/vms/web.toml"), FILE).expect("writes");
    fs::write(host.inside("/run/ours.xml"), xml("/run/larder/web-vda.sock")).expect("writes");
    fs::write(host.inside("/run/others.xml"), xml("/run/spdk.sock")).expect("writes");
    host
}

/// Returns /proc/PID/status of the server in the hook's record.
fn status_of_server(host: &Host) -> String {
    host.works(&["sh", "-c", "cat /proc/$(cut -d' ' -f2 /run/larder-hook/web)/status"])
}

/// Runs the hook; returns the exit status and the output.
fn hook(host: &Host, xml: &str, words: &str) -> (Option<i32>, String) {
    host.run(&["sh", "-c", &format!("exec {HOOK} {words} <{xml}")])
}

fn is_served(host: &Host) -> bool {
    host.run(&["larder", "status", "/run/larder/web.sock"]).0 == Some(0)
}

#[test]
fn foreign_domains_are_left_alone() {
    let host = host();
    for (xml, words) in [
        ("/run/others.xml", "web prepare begin -"),
        ("/run/ours.xml", "other prepare begin -"),
        ("/run/ours.xml", "'a domain; with $all' prepare begin -"),
        ("/run/ours.xml", "--help prepare begin -"),
        ("/run/ours.xml", "web start begin -"),
        ("/run/ours.xml", "web started begin -"),
        ("/run/ours.xml", "web migrate begin -"),
        ("/run/ours.xml", "web restore begin -"),
        ("/run/ours.xml", "web stopped end destroyed"),
        ("/run/ours.xml", "web release end destroyed"),
        ("/dev/null", "other prepare begin -"),
    ] {
        assert_eq!(hook(&host, xml, words), (Some(0), String::new()), "{words}");
    }
    assert!(!host.inside("/run/larder").exists());
}

/// The server serves when the hook returns, and ends with the domain.
#[test]
fn server_lives_from_prepare_to_release() {
    let host = host();
    let prepared = hook(&host, "/run/ours.xml", "web prepare begin -");
    assert_eq!(prepared, (Some(0), String::new()));
    assert!(is_served(&host));
    let process = fs::read_to_string(host.inside("/run/larder-hook/web")).expect("a note");
    // The server is confined like a systemd service.
    let status = status_of_server(&host);
    for line in ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"] {
        assert!(status.contains(line), "no {line}: {status}");
    }
    // A second start changes nothing.
    assert_eq!(hook(&host, "/run/ours.xml", "web reconnect begin -"), prepared);
    assert_eq!(fs::read_to_string(host.inside("/run/larder-hook/web")).ok(), Some(process));
    assert_eq!(hook(&host, "/run/ours.xml", "web release end shutdown"), prepared);
    assert!(!is_served(&host) && !host.inside("/run/larder-hook/web").exists());
    // The VM's file does not matter for the end: the domain may have been detached.
    hook(&host, "/run/ours.xml", "web prepare begin -");
    fs::remove_file(host.inside("/etc/larder/vms/web.toml")).expect("is there");
    assert_eq!(hook(&host, "/run/ours.xml", "web release end shutdown"), prepared);
    assert!(!is_served(&host));
}

/// A domain's AppArmor profile allows the sockets of that domain's disks before libvirt loads it.
#[test]
fn apparmor_profile_allows_own_sockets() {
    let host = host();
    let folder = "/etc/apparmor.d/libvirt";
    let uuid = "11111111-2222-3333-4444-555555555555";
    let with_uuid = xml("/run/larder/web-vda.sock").replace("</name>", &format!("</name><uuid>{uuid}</uuid>"));
    let with_uuid = with_uuid
        .replace("</devices>", "<disk type='vhostuser'><source type='unix' path='/run/spdk.sock'/></disk></devices>");
    fs::write(host.inside("/run/ours.xml"), with_uuid).expect("writes");
    let prepare = || assert_eq!(hook(&host, "/run/ours.xml", "web prepare begin -"), (Some(0), String::new()));
    let release = || assert_eq!(hook(&host, "/run/ours.xml", "web release end -"), (Some(0), String::new()));
    // Without AppArmor nothing is written.
    host.works(&["rm", "-rf", folder]);
    prepare();
    release();
    assert!(!host.inside(folder).exists());

    host.works(&["mkdir", "-p", folder]);
    let template =
        "profile LIBVIRT_TEMPLATE flags=(attach_disconnected) {\n  #include <abstractions/libvirt-qemu>\n}\n";
    fs::write(host.inside(&format!("{folder}/TEMPLATE.qemu")), template).expect("writes");
    let profile = || fs::read_to_string(host.inside(&format!("{folder}/libvirt-{uuid}"))).expect("there is one");
    prepare();
    let made = profile();
    for part in [
        &format!("profile libvirt-{uuid} flags=(attach_disconnected) {{"),
        &format!("\n  #include <libvirt/libvirt-{uuid}.files>\n"),
        "\n  \"/run/larder/web-vda.sock\" rw,\n",
    ] {
        assert!(made.contains(part), "no {part}: {made}");
    }
    assert!(!made.contains("spdk") && made.ends_with("\n}\n"), "{made}");
    release();
    // Rules that the host's owner has added are kept, and no rule is duplicated.
    let own = made.replace("{\n", "{\n  /srv/own r,\n");
    fs::write(host.inside(&format!("{folder}/libvirt-{uuid}")), &own).expect("writes");
    prepare();
    assert_eq!(profile(), own);
    release();
}

/// The hook's errors can only keep a domain from starting, never from running or ending.
#[test]
fn only_domain_start_can_fail() {
    let host = host();
    let file = host.inside("/etc/larder/vms/web.toml");
    for (text, words) in [
        (FILE.replace("disk.raw", "none.raw"), ["larder vm web", "none.raw: No such file"]),
        (FILE.replace("image", "imgae"), ["/etc/larder/vms/web.toml:2:1", "did you mean 'image'"]),
    ] {
        fs::write(&file, text).expect("writes");
        let (code, said) = hook(&host, "/run/ours.xml", "web prepare begin -");
        assert!(code.is_some_and(|code| code != 0), "{said}");
        for word in words {
            assert!(said.contains(word), "nothing of {word}: {said}");
        }
        let (code, said) = hook(&host, "/run/ours.xml", "web reconnect begin -");
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains(words[1]), "{said}");
        assert_eq!(hook(&host, "/run/ours.xml", "web release end failed").0, Some(0));
    }
    fs::write(&file, FILE).expect("writes");
    let other = xml("/run/larder/web-vda.sock").replace(
        "</devices>",
        "<disk type='vhostuser'><source type='unix' path='/run/larder/web-vdb.sock'/></disk></devices>",
    );
    fs::write(host.inside("/run/two.xml"), other).expect("writes");
    let (code, said) = hook(&host, "/run/two.xml", "web prepare begin -");
    assert!(code != Some(0) && said.contains("has none there"), "{said}");
    let (code, said) = hook(&host, "/dev/null", "web prepare begin -");
    assert!(code != Some(0) && said.contains("standard input"), "{said}");
    // If the program is missing, no domain is affected.
    fs::remove_file(host.folder.path().join("bin/larder")).expect("is there");
    assert_eq!(hook(&host, "/dev/null", "web prepare begin -"), (Some(0), String::new()));
}

/// The hook stops no process whose start time differs from the record, or whose record another user wrote.
#[test]
fn foreign_process_is_not_stopped() {
    let host = host();
    host.works(&[
        "sh",
        "-c",
        "sleep 1000 >/dev/null 2>&1 & echo $! >/run/sleeper; mkdir /run/larder; mkdir -m 700 /run/larder-hook",
    ]);
    let number = fs::read_to_string(host.inside("/run/sleeper")).expect("a number");
    // The PID of a process that has exited was reused.
    let note = format!("process {} 1\n", number.trim());
    fs::write(host.inside("/run/larder-hook/web"), note).expect("writes");
    let release = || hook(&host, "/run/ours.xml", "web release end -");
    assert_eq!(release(), (Some(0), String::new()));
    host.works(&["sh", "-c", "kill -0 $(cat /run/sleeper)"]);
    // A record that another user could have written is not trusted either.
    let note = "echo process $(cat /run/sleeper) $(cut -d' ' -f22 /proc/$(cat /run/sleeper)/stat)";
    host.works(&["sh", "-c", &format!("{note} >/run/larder/web.hook; rm -f /run/larder-hook/web")]);
    assert_eq!(release(), (Some(0), String::new()));
    host.works(&["sh", "-c", "kill -0 $(cat /run/sleeper)"]);
    host.works(&["sh", "-c", "mv /run/larder/web.hook /run/larder-hook/web; chmod 777 /run/larder-hook"]);
    let (_, said) = release();
    assert!(said.contains("others can write to it"), "{said}");
    host.works(&["sh", "-c", "kill -0 $(cat /run/sleeper); chmod 700 /run/larder-hook"]);
    assert_eq!(release(), (Some(0), String::new()));
    let (code, _) = host.run(&["sh", "-c", "kill -0 $(cat /run/sleeper)"]);
    assert_ne!(code, Some(0), "the same words in the hook's own folder are believed");
}

#[test]
fn start_waits_for_ending_server() {
    let host = host();
    let script = "mkdir -m 700 /run/larder-hook; sleep 2 & number=$!
        start=$(cut -d' ' -f22 /proc/$number/stat); echo $number >/run/ending
        echo process $number $start stopping >/run/larder-hook/web";
    host.works(&["sh", "-c", &format!("({script}) >/dev/null 2>&1")]);
    assert_eq!(hook(&host, "/run/ours.xml", "web prepare begin -"), (Some(0), String::new()));
    let (code, said) = host.run(&["sh", "-c", "kill -0 $(cat /run/ending)"]);
    assert_ne!(code, Some(0), "{said}");
    assert!(is_served(&host));
    hook(&host, "/run/ours.xml", "web release end -");
    assert!(!is_served(&host));
}

#[test]
fn systemd_runs_server_if_present() {
    let host = host();
    // A stand-in for systemctl records its arguments, and fails on request.
    let program = host.folder.path().join("bin/systemctl");
    let script = "#!/bin/sh\necho \"$*\" >>/run/told\n[ \"$1\" = is-active ] && { echo inactive; exit 3; }\n[ ! -e /run/refuse ] || { echo Job failed >&2; exit 1; }\n";
    install_script(script, &program);
    host.works(&["mkdir", "-p", "/run/systemd/system"]);
    assert_eq!(hook(&host, "/run/ours.xml", "web prepare begin -"), (Some(0), String::new()));
    assert_eq!(hook(&host, "/run/ours.xml", "web release end -"), (Some(0), String::new()));
    let told = fs::read_to_string(host.inside("/run/told")).expect("was called");
    assert_eq!(
        told,
        "start --quiet larder@web.service\nstop --quiet --no-block larder@web.service\nis-active larder@web.service\n"
    );
    fs::write(host.inside("/run/refuse"), "").expect("writes");
    let (code, said) = hook(&host, "/run/ours.xml", "web prepare begin -");
    assert!(code != Some(0) && said.contains("larder@web.service could not be started: Job failed"), "{said}");
}
