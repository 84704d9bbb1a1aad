//! Reloads of the VM's file.

use serde_json::{Value, json};

use crate::support::run_command;
use crate::{FrontEnd, Options, TEST_TIMEOUT, TWO, Vm, assert_io_works, data_io, ends, start_as_a_service, text, two};

/// Reloads the file by command; returns the exit status and the output.
fn reload(vm: &Vm) -> (Option<i32>, String) {
    run_command(vm.command(&["--reload"]))
}

fn disk(vm: &Vm, name: &str) -> Option<Value> {
    vm.disks().into_iter().find(|disk| disk["name"] == name)
}

#[test]
fn reload_applies_changes_under_guest() {
    let vm = two();
    let process = vm.start();
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    assert_eq!(reload(&vm), (Some(0), "web: already as configured in its file".to_owned()));

    let changed = TWO
        .replace(
            "serial = \"SYSTEM\"",
            "cache-mode = \"wa\"\ncache-endurance = \"1GiB\"\niops-read = 100000\nserial = \"SYSTEM\"",
        )
        .replace("prefetch = \"off\"", "prefetch = \"1MiB\"\nprefetch-ahead = \"64KiB\"")
        .replace("iops-total = 1000000\n", "");
    vm.write(&changed);
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "changed disk vda: limits: iops-read=100000",
        "changed disk vda: cache-mode: wa",
        "changed disk vda: cache-endurance: 1 GiB",
        "changed disk data: limits: none",
        "changed disk data: prefetch: 1 MiB of memory, 64 KiB ahead, for reads of at most 128 KiB",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (vda, data) = (disk(&vm, "vda").expect("it is there"), disk(&vm, "data").expect("it is there"));
    assert_eq!(vda["limits"], json!({"iops-read": 100_000}));
    assert_eq!((&vda["cache"]["mode"], &vda["cache"]["endurance"]), (&json!("wa"), &json!(1 << 30)));
    assert_eq!(data["limits"], json!({}));
    assert_eq!(data["prefetch"]["memory_limit"], 1 << 20);
    assert_io_works(&mut guest, 2);

    // Another cache replaces the current one.
    vm.write(&changed.replace("system.cache", "other.cache"));
    let (code, said) = reload(&vm);
    assert!(code == Some(0) && said.contains("cache: ") && said.contains("other.cache"), "{said}");
    assert_io_works(&mut guest, 3);
    let cache = disk(&vm, "vda").expect("it is there")["cache"].clone();
    assert!(cache["file"].as_str().expect("a path").ends_with("other.cache"), "{cache}");
    assert_eq!(cache["size"], 16 << 20);

    // A reload reverts changes that were made by other means.
    let body = "{\"limits\":{\"iops-total\":7}}";
    crate::run_tool(
        "curl",
        &["-sS", "--unix-socket", text(&vm.path("control")), "-X", "PATCH", "-d", body, "http://x/v1/disks/vda"],
    );
    let (code, said) = reload(&vm);
    assert!(code == Some(0) && said == "changed disk vda: limits: iops-read=100000", "{said}");
    drop(guest);
    ends(process);
}

/// A reload adds disks, and removes those that are not in use.
#[test]
fn reload_adds_and_removes_disks() {
    let vm = two();
    let process = vm.start();
    let third = "\n[[disk]]\nname = \"third\"\nimage = \"IMAGES/third.raw\"\nformat = \"raw\"\nsocket = \"third\"\n";
    vm.raw("third.raw", 4);
    vm.write(&format!("{TWO}{third}"));
    let (code, said) = reload(&vm);
    assert_eq!((code, said.as_str()), (Some(0), "changed disk third: it is served now"));
    let mut guest = FrontEnd::connect(&vm.path("third"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);

    vm.write(TWO);
    let (code, said) = reload(&vm);
    assert!(code == Some(1) && said.contains("pending disk third: it is in use"), "{said}");
    assert_io_works(&mut guest, 2);
    drop(guest);
    // The server notices the end of the guest when the socket closes.
    let gone = loop {
        let (code, said) = reload(&vm);
        if code != Some(1) {
            break (code, said);
        }
    };
    assert_eq!(gone, (Some(0), "changed disk third: it is not served any more".to_owned()));
    assert_eq!(vm.sockets(), ["control", "data.nbd", "vda"]);
    // The removed disk's image and socket are free.
    vm.write(&format!("{TWO}{}", third.replace("\"third\"\nimage", "\"again\"\nimage")));
    let (code, said) = reload(&vm);
    assert_eq!((code, said.as_str()), (Some(0), "changed disk again: it is served now"));
    let names: Vec<Value> = vm.disks().iter().map(|disk| disk["name"].clone()).collect();
    assert_eq!(names, ["vda", "data", "again"]);

    // A disk that cannot be opened is reported, and does not prevent other changes.
    let wrong = third.replace("third", "gone");
    vm.write(&format!("{}{wrong}", TWO.replace("1000000", "2000000")));
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(2), "{said}");
    for part in [
        "changed disk again: it is not served any more",
        "changed disk data: limits: iops-total=2000000",
        "failed  disk gone: ",
        "gone.raw",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    ends(process);
}

/// A reload names settings that need a restart, and an invalid file changes nothing.
#[test]
fn reload_names_unchangeable_settings() {
    let vm = two();
    let process = vm.start();
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    let before = vm.disks();
    let changed = TWO
        .replace("\"SYSTEM\"", "\"OTHER\"\nqueues = 2")
        .replacen("format = \"qcow2\"", "format = \"raw\"", 1)
        .replace("socket = \"vda\"", "socket = \"vda2\"")
        .replace("data.nbd", "data2.nbd")
        .replace("cache = \"IMAGES/system.cache\"\ncache-size = \"16MiB\"\n", "")
        .replace("control = \"control\"", "control = \"control\"\ncontrol-mode = \"0660\"");
    vm.write(&changed);
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(1), "{said}");
    for part in [
        "pending the control socket",
        "pending disk vda: format, cache, queues, serial, socket: takes effect when the VM's server is restarted",
        "pending disk data: nbd: takes effect",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(vm.sockets(), ["control", "data.nbd", "vda"]);

    vm.write(&TWO.replace("iops-total = 1000000", "iops-totl = 1"));
    let (code, said) = reload(&vm);
    assert!(code == Some(2) && said.contains("web.toml:") && said.contains("iops-total"), "{said}");
    // The same holds for a reload by signal.
    process.signal(libc::SIGHUP);
    process.wait_for("nothing has changed: ", TEST_TIMEOUT).expect("it says so");
    let of = |disks: &[Value], key: &str| disks.iter().map(|disk| disk[key].clone()).collect::<Vec<_>>();
    for key in ["limits", "exports"] {
        assert_eq!(of(&vm.disks(), key), of(&before, key));
    }
    assert_io_works(&mut guest, 2);
    drop(guest);
    ends(process);
}

#[test]
fn sighup_reloads_and_notifies_manager() {
    let vm = two();
    let (process, next) = start_as_a_service(&vm);
    assert!(next().starts_with("READY=1\n"));
    vm.write(&TWO.replace("1000000", "3000000"));
    process.signal(libc::SIGHUP);
    let reloading = next();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert!(next().starts_with("READY=1\n"));
    let limits = disk(&vm, "data").expect("it is there")["limits"].clone();
    assert_eq!(limits, json!({"iops-total": 3_000_000}));
    // Many signals at once are as good as one.
    (0..20).for_each(|_| process.signal(libc::SIGHUP));
    data_io(&vm, &["write -P 5 0 1M", "read -P 5 0 1M"]);
    ends(process);
}

/// A changed `[memory]` is reported as applied elsewhere, and does not prevent other changes.
#[test]
fn reload_leaves_memory_to_pager() {
    let vm = two();
    let process = vm.start();
    let memory = "\n[memory]\nbudget = \"1GiB\"\npid-file = \"pid\"\n";
    vm.write(&format!("{}{memory}", TWO.replace("iops-total = 1000000\n", "")));
    let (code, said) = reload(&vm);
    let elsewhere = "pending memory: not managed by this server; `systemctl reload larder-memory@web`";
    assert!(code == Some(1) && said.contains(elsewhere) && said.contains("changed disk data: limits: none"), "{said}");
    assert_eq!(reload(&vm), (Some(0), "web: already as configured in its file".to_owned()));
    // A file without a disk would end the server.
    vm.write(&format!("control = \"control\"\n{memory}"));
    let (code, said) = reload(&vm);
    assert!(code == Some(2) && said.contains("there is no disk"), "{said}");
    assert_eq!(vm.disks().len(), 2);
    ends(process);
}
