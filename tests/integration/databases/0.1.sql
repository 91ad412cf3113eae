-- The database of hangwatch 0.1 (schema 2) after a hang of the job run7, as `sqlite3 hangwatch.sqlite3 .dump` prints it. Do not change it: it is
-- what users of that version have.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('2');
CREATE TABLE attempts (
	server VARCHAR NOT NULL, 
	job VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	restart INTEGER NOT NULL, 
	world_size INTEGER NOT NULL, 
	hosts TEXT NOT NULL, 
	state VARCHAR NOT NULL, 
	opened_at VARCHAR NOT NULL, 
	heard_at VARCHAR NOT NULL, 
	PRIMARY KEY (server, job, number)
);
INSERT INTO "attempts" VALUES('','run7',0,0,4,'["node0"]','stalled','2026-11-26T04:03:42.765+00:00','2026-11-26T04:03:46.841+00:00');
CREATE TABLE deliveries (
	incident VARCHAR(26) NOT NULL, 
	event VARCHAR NOT NULL, 
	channel VARCHAR(16) NOT NULL, 
	server VARCHAR NOT NULL, 
	PRIMARY KEY (incident, event, channel)
);
CREATE TABLE incidents (
	id VARCHAR(26) NOT NULL, 
	job VARCHAR NOT NULL, 
	attempt INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	status VARCHAR NOT NULL, 
	opened_at VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	memory TEXT NOT NULL, server VARCHAR DEFAULT '' NOT NULL, revision INTEGER DEFAULT '0' NOT NULL, size INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "incidents" VALUES('01M8B0C52AKBMX94A1C6Y6H824','run7',0,'missing_rank','open','2026-11-26T04:03:46.888+00:00','{"id":"01M8B0C52AKBMX94A1C6Y6H824","job":"run7","attempt":0,"kind":"missing_rank","severity":"alert","status":"open","onset_at":"2026-11-26T04:03:42.804000Z","opened_at":"2026-11-26T04:03:46.888000Z","resolved_at":null,"resolution":null,"summary":"rank 2 has not entered all_reduce (call 2 of group default_pg), for which 3 ranks wait: it is at train.py:44 in load_batch","advice":"Its stack shows what it does instead of joining the others.","culprits":[2],"waiting":[0,1,3],"group":{"name":"0","desc":"default_pg","ranks":[0,1,2,3],"backend":"gloo"},"seq":2,"fields":[],"site":{"file":"/u/train.py","line":44,"function":"load_batch"},"calls":[{"ranks":[0,1,3],"seq":2,"op":"all_reduce","shapes":[[64]],"dtype":"float32","reduce_op":"sum","root":null,"peer":null,"splits":null,"detail":null,"site":{"file":"/u/train.py","line":52,"function":"step"}}],"divergence":null,"waits":[{"rank":0,"for":2,"group":"0","seq":2},{"rank":1,"for":2,"group":"0","seq":2},{"rank":3,"for":2,"group":"0","seq":2}],"processes":[{"rank":2,"host":"node0","pid":1002,"state":"S","exit_status":null,"signal":null,"exception":null,"flight_file":null}],"device":[],"hardware":[],"hardware_missing":[],"stacks":[{"ranks":[2],"thread":"MainThread","source":"py-spy","taken_at":"2026-11-26T04:03:46.841000Z","frames":[{"function":"load_batch","file":"/u/train.py","line":44,"text":"return self._ready.get()"},{"function":"main","file":"/u/train.py","line":60,"text":null}],"native":false,"error":null},{"ranks":[0,1,3],"thread":"MainThread","source":"py-spy","taken_at":"2026-11-26T04:03:45.823000Z","frames":[{"function":"step","file":"/u/train.py","line":52,"text":"dist.all_reduce(grad)"},{"function":"main","file":"/u/train.py","line":60,"text":null}],"native":false,"error":null}],"recovery":null}','{"members": {"2": "node0/1002-5", "0": "node0/1000-5", "1": "node0/1001-5", "3": "node0/1003-5"}, "alerted": "alert", "closed": false, "aborted": false, "reminders": 0, "told_at": "2026-11-26T04:03:46.892714+00:00"}','',0,1990);
CREATE INDEX ix_incidents_job ON incidents (job);
COMMIT;
